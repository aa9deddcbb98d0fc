"""The cache against a model in plain Python: a list of rows for each sequence."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.cache import KVCache, LayerShape, RowShape, Slot, Window
from outpace.core import OutpaceError

CPU = torch.device("cpu")


def shape(heads: int, size: int, dtype: torch.dtype = torch.float32) -> RowShape:
    return RowShape(heads, size, dtype, CPU)


KEYS, VALUES = shape(2, 3), shape(2, 5)
# Keys and values that differ, and layers that differ from each other: two buffers, one shared by three.
LAYERS = [LayerShape(KEYS, VALUES), LayerShape(KEYS, KEYS), LayerShape(VALUES, shape(1, 4, torch.float64))]


def tensor(values: list[list[float]], kind: RowShape, which: int) -> Tensor:
    """[B, heads, width, size], every number of a row telling its value, head, and place in the layer."""
    rows = torch.tensor(values, dtype=torch.float64)[:, None, :, None]
    heads = torch.arange(kind.heads)[None, :, None, None] * 0.25
    sizes = torch.arange(kind.size)[None, None, None, :] * 0.03125
    return (rows + heads + sizes + 0.5 * which).to(kind.dtype)


def feed(
    cache: KVCache, values: list[list[float]], first: int = 0
) -> tuple[Window, list[tuple[Tensor, Tensor]]]:
    """One forward that feeds these rows, a number each; padding is NaN. Returns the views of each layer."""
    window = cache.begin([len(rows) for rows in values], first)
    padded = [[math.nan] * window.width for _ in range(window.start, first)]
    padded += [rows + [math.nan] * (window.width - len(rows)) for rows in values]
    padded += [[math.nan] * window.width for _ in range(window.stop - window.start - len(padded))]
    views = []
    for layer, kinds in enumerate(cache.layers):
        keys, halves = tensor(padded, kinds.keys, 0), tensor(padded, kinds.values, 1)
        views.append(cache.append(layer, keys, halves))
    return window, views


def check_views(
    cache: KVCache, window: Window, views: list[tuple[Tensor, Tensor]], expected: list[list[float]]
) -> None:
    """What attention sees: every sequence's rows first, and nothing that is not finite behind them."""
    for (keys, values), kinds in zip(views, cache.layers, strict=True):
        for view, kind, which in ((keys, kinds.keys, 0), (values, kinds.values, 1)):
            assert view.shape == (window.stop - window.start, kind.heads, window.columns, kind.size)
            assert view.isfinite().all()
            for place, rows in enumerate(expected, window.first - window.start):
                assert torch.equal(view[place : place + 1, :, : len(rows)], tensor([rows], kind, which))


def check_rows(cache: KVCache, slots: list[Slot], model: list[list[float]]) -> None:
    assert cache.lengths == [len(rows) for rows in model]
    for slot, rows in zip(slots, model, strict=True):
        for layer, kinds in enumerate(cache.layers):
            keys, values = cache.rows(layer, slot)
            assert torch.equal(keys, tensor([rows], kinds.keys, 0))
            assert torch.equal(values, tensor([rows], kinds.values, 1))


def random_path(rng: random.Random, width: int) -> list[int]:
    return sorted(rng.sample(range(width), rng.randint(0, width)))


@pytest.mark.parametrize("static", [False, True])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), verbs=st.lists(st.sampled_from("affffkt"), max_size=40))
def test_against_a_list(static: bool, seed: int, verbs: list[str]) -> None:
    """Random allocations, feeds, paths, frees and truncations, in a cache that grows or has fixed shapes."""
    rng = random.Random(seed)
    cache = KVCache(LAYERS, 5, 200, static=True) if static else KVCache(LAYERS, 1, 2)
    slots: list[Slot] = []
    model: list[list[float]] = []
    number = 0.0
    for verb in verbs:
        if verb == "a" and len(slots) < 5:
            slots.append(cache.allocate())
            model.append([])
        elif verb == "f" and slots:
            first = rng.randrange(len(slots))
            count = rng.randint(1, len(slots) - first)
            widths = [rng.randint(0, 5) for _ in range(count)]
            widths[rng.randrange(count)] += 1
            new = []
            for width in widths:
                new.append([number + 1 + i for i in range(width)])
                number += width
            window, views = feed(cache, new, first)
            assert (window.width, window.first) == (max(widths), first)
            check_views(cache, window, views, [model[first + i] + rows for i, rows in enumerate(new)])
            paths = [random_path(rng, width) for width in widths]
            cache.keep(paths)
            for place, (rows, path) in enumerate(zip(new, paths, strict=True), first):
                model[place] += [rows[node] for node in path]
        elif verb == "k" and slots:
            gone = slots[rng.randrange(len(slots))]
            place, last = gone.index, len(slots) - 1
            cache.free(gone)
            slots[place], model[place] = slots[last], model[last]
            del slots[last], model[last]
        elif verb == "t" and slots:
            place = rng.randrange(len(slots))
            length = rng.randint(0, len(model[place]))
            path = random_path(rng, len(model[place]) - length) if rng.random() < 0.5 else []
            cache.truncate(slots[place], length, path)
            model[place][length:] = [model[place][length + row] for row in path]
        assert [slot.index for slot in slots] == list(range(len(slots))) and len(cache) == len(slots)
    check_rows(cache, slots, model)


def test_views_are_not_copies() -> None:
    cache = KVCache(LAYERS, 3, 16)
    for _ in range(3):
        cache.allocate()
    window, views = feed(cache, [[1.0, 2.0], [3.0, 4.0]], first=1)
    assert window.span == slice(0, 2)
    for layer, (keys, values) in enumerate(views):
        for view, kind in ((keys, LAYERS[layer].keys), (values, LAYERS[layer].values)):
            buffer = cache._buffers[kind]
            assert view.data_ptr() in [store[1].data_ptr() for store in buffer]
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    cache.keep([[0], [0, 1]])
    window, views = feed(cache, [[5.0], [6.0], [7.0, 8.0]])  # uneven: still views
    assert window.span is None
    assert views[0][0].data_ptr() == cache._buffers[KEYS].data_ptr()


def test_layers_of_one_shape_share_a_buffer() -> None:
    cache = KVCache([LayerShape(KEYS, KEYS)] * 6)
    assert len(cache._buffers) == 1
    assert len(KVCache(LAYERS)._buffers) == 3


def test_keep_moves_only_what_must_move() -> None:
    cache = KVCache(LAYERS, 2, 16)
    cache.allocate()
    cache.allocate()
    moved: list[tuple[list[int], ...]] = []
    move = cache._move

    def spy(*indices: list[int]) -> None:
        moved.append(indices)
        move(*indices)

    cache._move = spy  # type: ignore[method-assign]
    feed(cache, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    cache.keep([[0, 1], [0, 1, 2]])
    assert not moved
    feed(cache, [[7.0, 8.0, 9.0], [10.0]])
    cache.keep([[0, 2], [0]])
    assert moved == [([0], [4], [3])]


def test_rows_move_at_once() -> None:
    """A path whose targets are other rows' sources: all are read before any is written."""
    cache = KVCache(LAYERS, 1, 16)
    slot = cache.allocate()
    feed(cache, [[float(i) for i in range(8)]])
    cache.keep([[0, 2, 3, 4, 7]])
    check_rows(cache, [slot], [[0.0, 2.0, 3.0, 4.0, 7.0]])


def test_growing_copies_once_per_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    grown: list[tuple[int, int]] = []
    zeros = KVCache._zeros

    def spy(self: KVCache, kind: RowShape, slots: int, length: int) -> Tensor:
        grown.append((slots, length))
        return zeros(self, kind, slots, length)

    cache = KVCache([LayerShape(KEYS, KEYS)], 1, 4)
    slot = cache.allocate()
    monkeypatch.setattr(KVCache, "_zeros", spy)
    for row in range(100):
        feed(cache, [[float(row)]])
        cache.keep([[0]])
    assert grown == [(1, 8), (1, 16), (1, 32), (1, 64), (1, 128)]
    check_rows(cache, [slot], [[float(row) for row in range(100)]])
    for _ in range(7):
        cache.allocate()
    assert grown[5:] == [(2, 128), (4, 128), (8, 128)]
    feed(cache, [[1.0] * 300] + [[1.0]] * 7)
    assert grown[8:] == [(8, 400)]  # more than twice: as much as is asked for


def test_what_a_sequence_leaves_behind_is_zero() -> None:
    """NaN of a sequence that ended must not reach the next ones through masked columns: 0 x NaN is NaN."""
    cache = KVCache(LAYERS, 4, 32)
    good, bad, last = cache.allocate(), cache.allocate(), cache.allocate()
    feed(cache, [[1.0, 2.0], [math.nan] * 9, [3.0]])
    cache.keep([[0, 1], list(range(6)), [0]])
    cache.free(bad)  # the last one moves into its slot, and is shorter
    assert (last.index, cache.lengths) == (1, [2, 1])
    again = cache.allocate()
    window, views = feed(cache, [[4.0] * 12, [5.0], [6.0]])
    check_views(cache, window, views, [[1.0, 2.0] + [4.0] * 12, [3.0, 5.0], [6.0]])
    cache.keep([range(12), [0], [0]])
    feed(cache, [[7.0, math.nan, math.nan]])
    cache.keep([[0, 1, 2]])
    cache.truncate(good, 15)
    window, views = feed(cache, [[], [8.0] * 25, []])
    check_views(cache, window, views, [[1.0, 2.0] + [4.0] * 12 + [7.0], [3.0, 5.0] + [8.0] * 25, [6.0]])
    assert again.index == 2


def test_static_shapes() -> None:
    """Every forward covers all slots and all rows, whatever is in use; the places to write have one shape."""
    cache = KVCache(LAYERS, 4, 16, static=True)
    seen = set()
    for count in (1, 2, 4):
        while len(cache) < count:
            cache.allocate()
        for first in range(count):
            window = cache.begin([1] * (count - first), first, pad_to=2)
            assert window.span is None
            sequences, places = window.places(CPU)
            seen.add(
                (window.stop - window.start, window.width, window.columns, sequences.shape, places.shape)
            )
            cache.keep([[]] * (count - first))
    assert seen == {(4, 2, 16, (4, 1), (4, 2))}


def test_outgrowing_a_static_cache() -> None:
    cache = KVCache(LAYERS, 1, 4, static=True)
    cache.allocate()
    with pytest.raises(OutpaceError, match="slots >= 2"):
        cache.allocate()
    feed(cache, [[1.0, 2.0, 3.0]])
    cache.keep([[0, 1, 2]])
    with pytest.raises(OutpaceError, match="length >= 5"):
        cache.begin([2])
    window, views = feed(cache, [[4.0]])  # and it still works
    check_views(cache, window, views, [[1.0, 2.0, 3.0, 4.0]])


def test_either_grad_mode() -> None:
    """Made under one, written and grown under the other."""
    with torch.inference_mode():
        made = KVCache(LAYERS, 1, 2)
    made.allocate()
    feed(made, [[1.0]])
    made.keep([[0]])
    with torch.inference_mode():
        feed(made, [[2.0, 3.0, 4.0]])
        made.keep([[0, 2]])
    feed(made, [[5.0] * 9])
    made.keep([range(9)])
    assert made.lengths == [12]


def test_misuse() -> None:
    cache = KVCache(LAYERS)
    slot = cache.allocate()
    with pytest.raises(RuntimeError, match="begin"):
        cache.keep([[0]])
    with pytest.raises(RuntimeError, match="begin"):
        cache.append(0, torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 5))
    with pytest.raises(ValueError, match="in use"):
        cache.begin([1, 1])
    with pytest.raises(ValueError, match="cannot keep"):
        cache.truncate(slot, 1)
    cache.free(slot)
    with pytest.raises(ValueError, match="not in use"):
        cache.free(slot)
