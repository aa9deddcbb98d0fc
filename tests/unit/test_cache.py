"""The tensor cache against a model in plain Python: a list of rows for each slot."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices import GPU
from outpace.cache import CacheFull, KVCache, LayerShape, RowShape, Slot, StaticCache, Window
from outpace.cache.lanes import Lane
from outpace.core import OutpaceError

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=GPU)]


def shape(heads: int, size: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> RowShape:
    return RowShape(heads, size, dtype, device)


def layers_on(device: torch.device) -> list[LayerShape]:
    """Keys and values that differ, and layers that differ from each other: two of three share a buffer."""
    keys, values = shape(2, 3, device=device), shape(2, 5, device=device)
    last = shape(1, 4, torch.float64, device)
    return [LayerShape(keys, values), LayerShape(keys, keys), LayerShape(values, last)]


LAYERS = layers_on(CPU)


def tensor(values: list[list[float]], kind: RowShape, which: int) -> Tensor:
    """[B, heads, width, size], every number of a row telling its value, head, and place in the layer."""
    rows = torch.tensor(values, dtype=torch.float64)[:, None, :, None]
    heads = torch.arange(kind.heads)[None, :, None, None] * 0.25
    sizes = torch.arange(kind.size)[None, None, None, :] * 0.03125
    return (rows + heads + sizes + 0.5 * which).to(kind.device, kind.dtype)


Views = list[tuple[Window, list[tuple[Tensor, Tensor]]]]


def feed(cache: KVCache, values: dict[Slot, list[float]]) -> Views:
    """One forward that feeds these rows, a number each; padding is NaN. Returns the views of each layer."""
    found = []
    for window in cache.begin({slot: len(rows) for slot, rows in values.items()}):
        own = [values.get(slot, []) if slot is not None else [] for slot in window.slots]
        padded = [rows + [math.nan] * (window.width - len(rows)) for rows in own]
        views = []
        for layer, kinds in enumerate(cache.layers):
            keys, halves = tensor(padded, kinds.keys, 0), tensor(padded, kinds.values, 1)
            views.append(window.append(layer, keys, halves))
        found.append((window, views))
    return found


def add(cache: KVCache, values: dict[Slot, list[float]]) -> None:
    """Feed rows and keep them all."""
    feed(cache, values)
    cache.keep({slot: range(len(rows)) for slot, rows in values.items()})


def check_views(cache: KVCache, found: Views, expected: dict[Slot, list[float]]) -> None:
    """Check the rows that attention reads: every slot's rows first, and only finite values after them."""
    seen = set()
    for window, views in found:
        for (keys, values), kinds in zip(views, cache.layers, strict=True):
            for view, kind, which in ((keys, kinds.keys, 0), (values, kinds.values, 1)):
                assert view.shape == (len(window.slots), kind.heads, window.columns, kind.size)
                assert view.isfinite().all()
                for place, slot in enumerate(window.slots):
                    if slot in expected:
                        rows = expected[slot]
                        own = view[place : place + 1, :, : len(rows)]
                        assert torch.equal(own, tensor([rows], kind, which))
        seen |= set(window.slots)
    assert set(expected) <= seen


def check_rows(cache: KVCache, model: dict[Slot, list[float]]) -> None:
    for slot, rows in model.items():
        assert cache.length(slot) == len(rows) <= cache.room(slot)
        for layer, kinds in enumerate(cache.layers):
            keys, values = cache.rows(layer, slot)
            assert torch.equal(keys, tensor([rows], kinds.keys, 0))
            assert torch.equal(values, tensor([rows], kinds.values, 1))


def check_zeros(cache: KVCache) -> None:
    """Check that rows not written by any slot are zero, except scratch rows."""
    for lane in cache._lanes:
        for place in range(lane.places):
            written = lane.seats[place].written if place < len(lane.seats) else 0
            for buffer in lane.buffers:
                assert not buffer[:, place, :, written : lane.room].any()


def random_path(rng: random.Random, width: int) -> list[int]:
    return sorted(rng.sample(range(width), rng.randint(0, width)))


KINDS: dict[str, dict[str, Any]] = {
    "one lane": {"slots": 1, "length": 2, "spread": math.inf},
    "classes": {"slots": 1, "length": 2, "spread": 1},
    "as made": {"slots": 1, "length": 2},
    "capacity": {"slots": 2, "length": 3, "capacity": 90},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["static", *KINDS])
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), verbs=st.lists(st.sampled_from("aafffffktrbp"), max_size=40))
def test_against_a_list(device: torch.device, kind: str, seed: int, verbs: list[str]) -> None:
    """Random allocations, feeds, paths, frees, truncations, copies and reservations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "_least_room", 4)
        patch.setattr("outpace.cache.lanes._TOGETHER", 2)
        layers = layers_on(device)
        cache = StaticCache(layers, 5, 300) if kind == "static" else KVCache(layers, **KINDS[kind])
        run(cache, random.Random(seed), verbs)


def run(cache: KVCache, rng: random.Random, verbs: list[str]) -> None:
    began = cache.reserved, cache.bytes
    model: dict[Slot, list[float]] = {}
    numbers: dict[Slot, int] = {}
    blocks: list[tuple[Any, list[float]]] = []
    number = 0.0
    for verb in verbs:
        some = rng.choice(list(model)) if model else None
        before = cache.reserved
        try:
            if verb == "a" and len(model) < 5:
                rows = rng.choice([0, 1, 5, 12, 40])
                slot = cache.allocate(rows)
                assert cache.room(slot) >= rows
                model[slot], numbers[slot] = [], slot.number
            elif verb == "f" and model:
                fed = rng.sample(list(model), rng.randint(1, len(model)))
                new: dict[Slot, list[float]] = {}
                for slot in fed:
                    new[slot] = [number + 1 + i for i in range(rng.choice([0, 1, 2, 5, 11]))]
                    number += len(new[slot])
                if any(new.values()):
                    views = feed(cache, new)
                    check_views(
                        cache, views, {slot: model[slot] + rows for slot, rows in new.items() if rows}
                    )
                    paths = {slot: random_path(rng, len(rows)) for slot, rows in new.items()}
                    left_out = [slot for slot, path in paths.items() if rng.random() < 0.2]
                    for slot in left_out:
                        del paths[slot]
                    cache.keep(paths)
                    for slot, path in paths.items():
                        model[slot] += [new[slot][node] for node in path]
            elif verb == "k" and some:
                cache.free(some)
                del model[some], numbers[some]
            elif verb == "t" and some:
                length = rng.randint(0, len(model[some]))
                path = random_path(rng, len(model[some]) - length) if rng.random() < 0.5 else []
                cache.truncate(some, length, path)
                model[some][length:] = [model[some][length + row] for row in path]
            elif verb == "r" and some:
                start = rng.randint(0, len(model[some]))
                stop = rng.randint(start, len(model[some]))
                blocks.append((cache.read_rows(some, start, stop), model[some][start:stop]))
            elif verb == "b" and some and blocks:
                block, rows_read = rng.choice(blocks)
                cache.write_rows(some, block)
                model[some] += rows_read
            elif verb == "p" and some:
                cache.reserve(some, len(model[some]) + 20)
                assert cache.room(some) >= len(model[some]) + 20
        except CacheFull:
            assert cache.static or cache.capacity is not None
            assert cache.reserved <= before  # at most free places have gone
        assert cache.capacity is None or cache.reserved <= cache.capacity
        assert len(cache) == len(model)
        assert {slot: slot.number for slot in model} == numbers
        assert len(set(numbers.values())) == len(numbers)
    check_rows(cache, model)
    check_zeros(cache)
    if cache.spread == math.inf or cache.static:
        assert len(cache._lanes) == 1
    for slot in model:
        cache.free(slot)
    assert (cache.reserved, cache.bytes) == began
    check_zeros(cache)


def test_views_are_not_copies() -> None:
    cache = KVCache(LAYERS, 3, 16)
    first, second, third = (cache.allocate() for _ in range(3))
    ((window, views),) = feed(cache, {second: [1.0, 2.0], third: [3.0, 4.0]})
    assert window.span == slice(0, 2)
    storages = [buffer.untyped_storage().data_ptr() for buffer in cache._lanes[0].buffers]
    for pair in views:
        for view in pair:
            assert view.untyped_storage().data_ptr() in storages
    cache.keep({second: [0], third: [0, 1]})
    ((window, views),) = feed(cache, {first: [5.0], third: [7.0, 8.0], second: [6.0]})  # uneven: still views
    assert window.span is None and window.slots == [first, second, third]
    assert views[0][0].data_ptr() == cache._lanes[0].buffers[0].data_ptr()


def test_layers_of_one_shape_share_buffers() -> None:
    keys = LAYERS[0].keys
    assert len(KVCache([LayerShape(keys, keys)] * 8)._lanes[0].buffers) == 1
    assert len(KVCache([LayerShape(keys, keys)] * 9)._lanes[0].buffers) == 2
    assert len(KVCache(LAYERS)._lanes[0].buffers) == 3


def test_keep_moves_only_what_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(LAYERS, 2, 16)
    first, second = cache.allocate(), cache.allocate()
    moved: list[tuple[list[int], ...]] = []
    move = Lane.move

    def spy(self: Lane, *indices: list[int]) -> None:
        moved.append(indices)
        move(self, *indices)

    monkeypatch.setattr(Lane, "move", spy)
    add(cache, {first: [1.0, 2.0, 3.0], second: [4.0, 5.0, 6.0]})
    assert not moved
    feed(cache, {first: [7.0, 8.0, 9.0], second: [10.0]})
    cache.keep({first: [0, 2], second: [0]})
    assert moved == [([0], [5], [4])]


def test_rows_move_at_once() -> None:
    """A path whose targets are other rows' sources: all are read before any is written."""
    cache = KVCache(LAYERS, 1, 16)
    slot = cache.allocate()
    feed(cache, {slot: [float(i) for i in range(8)]})
    cache.keep({slot: [0, 2, 3, 4, 7]})
    check_rows(cache, {slot: [0.0, 2.0, 3.0, 4.0, 7.0]})


def test_growing_copies_once_per_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    resize = Lane.resize

    def spy(self: Lane, places: int, room: int) -> None:
        if (places, room) != (self.places, self.room):
            made.append((places, room))
        resize(self, places, room)

    cache = KVCache(LAYERS, 1, 256)
    slot = cache.allocate()
    monkeypatch.setattr(Lane, "resize", spy)
    rows = [float(row) for row in range(1100)]
    for row in rows:
        add(cache, {slot: [row]})
    assert made == [(1, 512), (1, 1024), (1, 2048)]
    check_rows(cache, {slot: rows})
    made.clear()
    for _ in range(8):
        cache.allocate(1024)
    assert made == [(2, 2048), (4, 2048), (8, 2048), (16, 2048)]


# -- length classes ---------------------------------------------------------------------------------------


def lanes(cache: KVCache) -> list[tuple[int, int]]:
    """Slots in use and room of each lane."""
    return [(len(lane.seats), lane.room) for lane in cache._lanes]


def test_a_long_sequence_does_not_cost_the_short_ones() -> None:
    cache = KVCache(LAYERS)
    short = [cache.allocate(200) for _ in range(15)]
    long = cache.allocate(32_000)
    assert lanes(cache) == [(15, 256), (1, 32_768)]
    assert cache.reserved == 16 * 256 + 32_768
    values = {slot: [float(place)] * 3 for place, slot in enumerate(short)} | {long: [9.0] * 2000}
    columns = {len(window.slots): window.columns for window, _ in feed(cache, values)}
    assert columns == {15: 3, 1: 2000}
    cache.keep({slot: range(len(rows)) for slot, rows in values.items()})
    check_rows(cache, values)
    cache.free(long)
    assert lanes(cache) == [(15, 256)]


def test_a_lane_is_at_most_as_wide_as_four_times_the_least_need() -> None:
    cache = KVCache(LAYERS)
    slots = [cache.allocate(100), cache.allocate(1000)]
    assert lanes(cache) == [(2, 1024)]  # one lane for both: no forward of its own
    slots.append(cache.allocate(1025))
    assert lanes(cache) == [(2, 1024), (1, 2048)]
    slots.append(cache.allocate(600))  # the narrowest that will do
    assert lanes(cache) == [(3, 1024), (1, 2048)]
    add(cache, {slots[1]: [1.0] * 1000, slots[0]: [2.0] * 3, slots[3]: [3.0] * 2, slots[2]: [4.0]})
    add(cache, {slots[1]: [5.0] * 100})  # it outgrows its lane, and moves alone
    assert lanes(cache) == [(2, 1024), (2, 2048)]
    assert [slot.number for slot in slots] == [0, 1, 2, 3]
    model = {slots[0]: [2.0] * 3, slots[1]: [1.0] * 1000 + [5.0] * 100, slots[2]: [4.0], slots[3]: [3.0] * 2}
    check_rows(cache, model)
    check_zeros(cache)


def test_slots_that_grow_together_stay_together() -> None:
    cache = KVCache(LAYERS)
    slots = [cache.allocate(200) for _ in range(3)]
    add(cache, {slot: [1.0] * 250 for slot in slots})
    add(cache, dict.fromkeys(slots[:1], [2.0] * 10))
    assert lanes(cache) == [(3, 512)]
    add(cache, dict.fromkeys(slots[:1], [3.0] * 800))
    assert lanes(cache) == [(2, 512), (1, 2048)]
    check_rows(cache, {slots[0]: [1.0] * 250 + [2.0] * 10 + [3.0] * 800, slots[1]: [1.0] * 250})


def test_memory_is_given_back() -> None:
    cache = KVCache(LAYERS)
    began = cache.bytes
    slots = [cache.allocate(300) for _ in range(9)]
    assert cache.reserved == 16 * 512
    for slot in slots[5:]:
        cache.free(slot)
    assert cache.reserved == 16 * 512
    cache.free(slots[4])  # three quarters of the places are free
    assert cache.reserved == 8 * 512
    for slot in slots[:4]:
        cache.free(slot)
    assert cache.bytes == began


def test_capacity() -> None:
    cache = KVCache(LAYERS, capacity=2048)
    first = cache.allocate(700)
    assert cache.reserved == 1024 and cache.cost(1500) == 2048 and cache.cost(2000) == 2048
    with pytest.raises(CacheFull, match=r"1024 of 2048 rows are reserved"):
        cache.allocate(1025)
    second = cache.allocate(1)
    assert lanes(cache) == [(2, 1024)]
    with pytest.raises(CacheFull):
        cache.allocate(1)
    add(cache, {slot: [float(slot.number)] * 5 for slot in (first, second)})
    with pytest.raises(CacheFull):
        cache.reserve(second, 1025)
    check_rows(cache, {slot: [float(slot.number)] * 5 for slot in (first, second)})
    cache.free(second)
    cache.reserve(first, 2048)
    check_rows(cache, {first: [0.0] * 5})
    with pytest.raises(OutpaceError, match="more than the capacity"):
        KVCache(LAYERS, 4, 1024, capacity=4095)


@pytest.mark.parametrize("rows", [1, 256, 257, 5000])
def test_what_is_left_is_enough_for_what_a_slot_costs(rows: int) -> None:
    """``allocate`` succeeds while ``capacity - reserved`` is at least ``cost``, with any other slots."""
    for others in ([], [100] * 5, [4000, 100], [300, 1000, 9000]):
        cache = KVCache(LAYERS, capacity=30_000)
        for need in others:
            cache.allocate(need)
        cache.capacity = cache.reserved + cache.cost(rows)
        cache.allocate(rows)


def test_a_place_that_is_not_used_makes_room() -> None:
    cache = KVCache(LAYERS, capacity=16 * 256)
    slots = [cache.allocate(256) for _ in range(9)]
    assert cache.reserved == 16 * 256
    cache.allocate(7 * 256)  # the 7 free places go
    assert cache.reserved == 16 * 256 and lanes(cache)[0] == (9, 256)
    for slot in slots:
        assert cache.room(slot) == 256


def test_growing_holds_one_old_buffer_beside_the_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told in the docstring: beside the rows reserved, those of 8 layers of the lane."""
    keys = LAYERS[0].keys
    cache = KVCache([LayerShape(keys, keys)] * 32, 4, 256)
    lane, most = cache._lanes[0], 0
    old = cache.bytes
    real = torch.zeros

    def spy(*args: Any, **options: Any) -> Tensor:
        nonlocal most
        made = real(*args, **options)
        most = max(most, cache.bytes + made.nbytes)
        return made

    monkeypatch.setattr(torch, "zeros", spy)
    lane.resize(8, 256)
    assert len(lane.buffers) == 4 and most == cache.bytes + old // 4


@pytest.mark.parametrize("fails", range(4))
def test_a_lane_grows_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    keys = LAYERS[0].keys
    cache = KVCache([LayerShape(keys, keys)] * 32, 4, 256)
    lane, real, count = cache._lanes[0], torch.zeros, itertools.count()
    before = [buffer.shape for buffer in lane.buffers]

    def full(*args: Any, **options: Any) -> Tensor:
        if next(count) == fails:
            raise MemoryError
        return real(*args, **options)

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(MemoryError):
        lane.resize(8, 256)
    assert (lane.places, lane.room) == (4, 256) and [buffer.shape for buffer in lane.buffers] == before
    lane.resize(8, 256)
    assert (lane.places, lane.room) == (8, 256)


def test_what_a_sequence_leaves_behind_is_zero() -> None:
    """NaN of a sequence that ended must not reach the next ones through masked columns: 0 x NaN is NaN."""
    cache = KVCache(LAYERS, 4, 32)
    good, bad, last = cache.allocate(), cache.allocate(), cache.allocate()
    feed(cache, {good: [1.0, 2.0], bad: [math.nan] * 9, last: [3.0]})
    cache.keep({good: [0, 1], bad: list(range(6)), last: [0]})
    cache.free(bad)  # the last one moves into its place, and is shorter
    assert (last.number, cache.length(good), cache.length(last)) == (2, 2, 1)
    again = cache.allocate()
    assert again.number == 1
    views = feed(cache, {good: [4.0] * 12, last: [5.0], again: [6.0]})
    check_views(cache, views, {good: [1.0, 2.0] + [4.0] * 12, last: [3.0, 5.0], again: [6.0]})
    cache.keep({good: range(12), last: [0], again: [0]})
    feed(cache, {good: [7.0, math.nan, math.nan]})
    cache.keep({good: [0, 1, 2]})
    cache.truncate(good, 15)
    views = feed(cache, {last: [8.0] * 10})
    check_views(cache, views, {last: [3.0, 5.0] + [8.0] * 10})
    check_zeros(cache)


def test_rows_that_moved_to_another_lane_leave_zeros_behind() -> None:
    cache = KVCache(LAYERS, 3)
    slots = [cache.allocate(256) for _ in range(3)]
    add(cache, {slots[0]: [math.nan] * 200, slots[1]: [1.0], slots[2]: [2.0]})
    cache.reserve(slots[0], 5000)
    assert lanes(cache) == [(2, 256), (1, 8192)]
    check_zeros(cache)
    check_rows(cache, {slots[1]: [1.0], slots[2]: [2.0]})
    again = cache.allocate()
    check_views(cache, feed(cache, {again: [3.0], slots[1]: [4.0] * 250}), {again: [3.0]})


def test_provisional_rows() -> None:
    cache = KVCache(LAYERS, 2, 16)
    first, second = cache.allocate(), cache.allocate()
    add(cache, {first: [1.0], second: [2.0, 3.0]})
    with cache.provisional():
        add(cache, {first: [4.0] * 300})
        check_rows(cache, {first: [1.0] + [4.0] * 300})
    check_rows(cache, {first: [1.0], second: [2.0, 3.0]})
    check_zeros_of(cache, first, 1)
    with cache.provisional({}):
        add(cache, {second: [5.0, 6.0]})
    with cache.provisional({second: 2}):
        check_rows(cache, {second: [2.0, 3.0, 5.0, 6.0]})
        add(cache, {second: [7.0] * 400})  # what was there ahead moves along
        check_rows(cache, {second: [2.0, 3.0, 5.0, 6.0] + [7.0] * 400})
    check_rows(cache, {first: [1.0], second: [2.0, 3.0]})


def check_zeros_of(cache: KVCache, slot: Slot, start: int) -> None:
    seat = cache._seats[slot]
    assert not any(buffer[:, seat.place, :, start : seat.lane.room].any() for buffer in seat.lane.buffers)


@pytest.mark.parametrize("device", DEVICES)
def test_static_shapes(device: torch.device) -> None:
    """A forward covers slots and columns by powers of two; the places to write have one shape for each."""
    cache = StaticCache(layers_on(device), 6, 16)
    assert (cache.max_slots, cache.max_length, cache.cost(3)) == (6, 16, 16)
    seen = set()
    slots: list[Slot] = []
    for count in (1, 2, 3, 5, 6):
        while len(slots) < count:
            slots.append(cache.allocate())
        for first in range(count):
            (window,) = cache.begin_fixed(dict.fromkeys(slots[first:], 1), 2)
            assert window.span is None
            sequences, places = window.written(device)
            seen.add((len(window.slots), window.width, window.columns, sequences.shape, places.shape))
            cache.keep({})
    assert seen == {(count, 2, 16, (count, 1), (count, 2)) for count in (1, 2, 4, 6)}


def test_columns_of_fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.cache.static._LEAST_COLUMNS", 4)
    cache = StaticCache(LAYERS, 1, 20)
    slot = cache.allocate()
    seen = []
    for _ in range(20):
        (window,) = cache.begin_fixed({slot: 1}, 1)
        seen.append(window.columns)
        cache.keep({slot: [0]})
    assert seen == [4] * 4 + [8] * 4 + [16] * 8 + [20] * 4
    cache.truncate(slot, 5)
    (window,) = cache.begin({slot: 1})
    assert window.columns == 6 and window.span == slice(5, 6)  # as large as it must be


def test_outgrowing_a_static_cache() -> None:
    cache = StaticCache(LAYERS, 1, 4)
    slot = cache.allocate()
    with pytest.raises(CacheFull, match="slots >= 2"):
        cache.allocate()
    add(cache, {slot: [1.0, 2.0, 3.0]})
    with pytest.raises(CacheFull, match="length >= 5"):
        cache.begin({slot: 2})
    check_views(cache, feed(cache, {slot: [4.0]}), {slot: [1.0, 2.0, 3.0, 4.0]})  # and it still works


def test_either_grad_mode() -> None:
    """Made under one, written and grown under the other."""
    with torch.inference_mode():
        made = KVCache(LAYERS, 1, 2)
    slot = made.allocate()
    add(made, {slot: [1.0]})
    with torch.inference_mode():
        feed(made, {slot: [2.0, 3.0, 4.0]})
        made.keep({slot: [0, 2]})
    add(made, {slot: [5.0] * 9})
    assert made.length(slot) == 12


def test_misuse() -> None:
    cache = KVCache(LAYERS)
    slot = cache.allocate()
    with pytest.raises(RuntimeError, match="begin"):
        cache.keep({slot: [0]})
    with pytest.raises(ValueError, match="not in use"):
        cache.begin({Slot(0): 1})
    with pytest.raises(ValueError, match="cannot keep"):
        cache.truncate(slot, 1)
    with pytest.raises(ValueError, match="rows 0 to 1 of 0"):
        cache.read_rows(slot, 0, 1)
    beside = cache.allocate()
    feed(cache, {slot: [1.0, 2.0]})
    for paths in ({slot: [2]}, {beside: [0]}):
        with pytest.raises(ValueError, match="cannot keep"):
            cache.keep(paths)
    cache.free(slot)
    with pytest.raises(ValueError, match="not in use"):
        cache.free(slot)
