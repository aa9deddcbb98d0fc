"""The cache of states: what a slot's states are while slots come, go and move, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outpace.cache import LayerShape, NextStates, RowShape, Slot, StateCache, StateShape, StateWindow
from outpace.cache.base import CacheFull
from outpace.core import OutpaceError

CPU = torch.device("cpu")
ROWS = [LayerShape(RowShape(1, 2, torch.float32, CPU), RowShape(1, 2, torch.float32, CPU))]
STATES = [StateShape((3,), torch.float32, CPU), StateShape((2, 2), torch.float64, CPU)]


class Fed(NextStates):
    """Adds the kept rows, counted from 1, to a state."""

    def at(self, before: Tensor, sequence: int, path: Sequence[int]) -> Tensor:
        return before + sum(row + 1 for row in path)


def make(layers: list[LayerShape] = ROWS, **options: int) -> StateCache:
    return StateCache(layers, STATES, **options)


def feed(cache: StateCache, paths: dict[Slot, Sequence[int]], width: int = 3) -> None:
    for window in cache.begin(dict.fromkeys(paths, width)):
        assert isinstance(window, StateWindow)
        window.made = dict.fromkeys(range(len(STATES)), Fed())
    cache.keep(paths)


def state(cache: StateCache, slot: Slot) -> float:
    """The number that a slot's states consist of."""
    (number,) = {float(value) for each in cache.read_state(slot) for value in each.flatten()}
    return number


@pytest.mark.parametrize("layers", [ROWS, []])
def test_states_follow_their_slots(layers: list[LayerShape]) -> None:
    cache = make(layers)
    first, second, third = (cache.allocate(8) for _ in range(3))
    feed(cache, {first: [0], second: [0, 1], third: [0, 2]})
    assert [state(cache, slot) for slot in (first, second, third)] == [1, 3, 4]
    cache.free(first)  # the last one moves to its place
    assert [state(cache, slot) for slot in (second, third)] == [3, 4]
    again = cache.allocate(8)
    assert state(cache, again) == 0
    cache.reserve(third, 5000)  # another lane
    assert [state(cache, slot) for slot in (second, third, again)] == [3, 4, 0]
    feed(cache, {third: [0], again: []})
    assert [state(cache, slot) for slot in (second, third, again)] == [3, 5, 0]
    assert [cache.length(slot) for slot in (second, third, again)] == [2, 3, 0]


def test_states_at_places_of_a_window_that_skips_others_are_kept() -> None:
    cache = make()
    slots = [cache.allocate(128) for _ in range(3)]
    windows = cache.begin({slots[0]: 60, slots[2]: 60}, groups=[[slots[0], slots[2]]])
    assert [window.places for window in windows] == [[0, 2]]
    for window in windows:
        assert isinstance(window, StateWindow)
        window.made = dict.fromkeys(range(len(STATES)), Fed())
    cache.keep({slots[0]: [0], slots[2]: [0, 1]})
    assert [state(cache, slot) for slot in slots] == [1, 0, 3]


def test_rows_that_are_not_kept_leave_no_trace() -> None:
    cache = make()
    slot, other = cache.allocate(), cache.allocate()
    feed(cache, {slot: [], other: [0]})
    assert state(cache, slot) == 0 and state(cache, other) == 1
    cache.begin({slot: 3})  # an interrupted forward
    feed(cache, {slot: [0, 1]})
    assert state(cache, slot) == 3
    with pytest.raises(ValueError, match="cannot keep"):
        feed(cache, {slot: [0, 3]})
    assert state(cache, slot) == 3


def test_committed_rows_cannot_be_dropped() -> None:
    cache = make()
    slot = cache.allocate()
    feed(cache, {slot: [0, 1]})
    cache.truncate(slot, 2)
    for length, path in ((1, ()), (0, (1,)), (2, (0,))):
        with pytest.raises(OutpaceError, match="is not kept"):
            cache.truncate(slot, length, path)
    assert cache.length(slot) == 2 and state(cache, slot) == 3


def test_provisional_rows() -> None:
    cache = make()
    slot = cache.allocate()
    feed(cache, {slot: [0]})
    with cache.provisional():
        feed(cache, {slot: [0, 1, 2]})
        assert state(cache, slot) == 7
    assert state(cache, slot) == 1 and cache.length(slot) == 1
    with pytest.raises(OutpaceError, match="ahead"), cache.provisional({slot: 1}):
        pass


@pytest.mark.parametrize("layers", [ROWS, []])
def test_copies(layers: list[LayerShape]) -> None:
    cache = make(layers)
    slot = cache.allocate()
    feed(cache, {slot: [0, 1]})
    other = cache.allocate()
    cache.write_rows(other, cache.read_rows(slot, 0, 2))
    assert cache.length(other) == 2 and state(cache, other) == 0
    cache.write_state(other, cache.read_state(slot))
    assert state(cache, other) == 3


@pytest.mark.parametrize(("layers", "rows"), [(ROWS, 256 + 3), ([], 1)])
def test_memory_is_counted(layers: list[LayerShape], rows: int) -> None:
    """A slot's states count as the rows that have their bytes: 44 bytes, of 16 a row."""
    cache = make(layers, length=1, capacity=2 * rows)
    assert cache.cost(10) == rows
    assert cache.row_bytes == (16 if layers else 44)
    assert cache.copied_bytes(2) == (32 if layers else 0)
    slots = [cache.allocate(256) for _ in range(2)]
    assert cache.reserved == 2 * rows
    assert cache.bytes >= 2 * 44 + (2 * 256 * 16 if layers else 0)
    with pytest.raises(CacheFull):
        cache.allocate(256)
    cache.free(slots[0])
    cache.allocate(256)


def test_a_lane_grows_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(length=4)
    slot = cache.allocate(4)
    feed(cache, {slot: [0]})

    def fail(shape: StateShape, places: int) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(StateShape, "zeros", fail)
        with pytest.raises(MemoryError):
            cache.allocate(4)
    assert len(cache) == 1 and state(cache, slot) == 1
    other = cache.allocate(4)
    feed(cache, {slot: [0], other: [0, 1]})
    assert [state(cache, each) for each in (slot, other)] == [2, 3]
