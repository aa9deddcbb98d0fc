"""The cache of models with recurrent layers: states of each slot, beside its rows of keys and values.

A row can be dropped; a state cannot be undone. So a forward leaves the states of the slots as they are, and
says what each becomes at each of its rows; ``keep`` takes those of the last row kept. Of committed rows only
the last one's states exist, so no row before it can be the new end: ``truncate`` refuses it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.cache.base import Slot
from outpace.cache.kv import KVCache
from outpace.cache.lanes import BufferLayout, Lane, LayerShape, Seat, Window
from outpace.core import OutpaceError


@dataclass(frozen=True)
class StateShape:
    """Shape of a state of a slot."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def zeros(self, places: int) -> Tensor:
        # Outside inference mode, so that it can be written in and outside of it.
        with torch.inference_mode(False):
            return torch.zeros((places, *self.size), dtype=self.dtype, device=self.device)


class NextStates(ABC):
    """The new values that a forward computes for one of its slots' states."""

    @abstractmethod
    def at(self, before: Tensor, sequence: int, path: Sequence[int]) -> Tensor:
        """The state of a sequence after a path of the rows that it fed.

        Args:
            before: its state before the forward, without the dimension of sequences.
            sequence: its index in the forward's window.
            path: rows, in ascending order, at least one.
        """


class StateLane(Lane):
    """A lane whose slots have states too.

    Attributes:
        states: one tensor [places, ...] per state; zeros at free places.
    """

    def __init__(
        self, layouts: list[BufferLayout], places: int, room: int, shapes: Sequence[StateShape]
    ) -> None:
        super().__init__(layouts, places, room)
        self._shapes = shapes
        self.states = [shape.zeros(places) for shape in shapes]

    def resize(self, places: int, room: int) -> None:
        states = self.states
        if places != self.places:
            states = [shape.zeros(places) for shape in self._shapes]
            for new, old in zip(states, self.states, strict=True):
                new[: len(self.seats)] = old[: len(self.seats)]
        super().resize(places, room)  # all or nothing; so nothing after it may fail
        self.states = states

    def take_over(self, seat: Seat) -> None:
        old, place = seat.lane, seat.place
        assert isinstance(old, StateLane)
        for new, before in zip(self.states, old.states, strict=True):
            new[len(self.seats)] = before[place]
        super().take_over(seat)

    def leave(self, place: int, written: int) -> None:
        last = len(self.seats) - 1
        for state in self.states:
            state[place] = state[last]
            state[last] = 0
        super().leave(place, written)


class StateWindow(Window):
    """A window whose forward changes states.

    Attributes:
        made: the new values of each state, by its index.
    """

    made: dict[int, NextStates]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made = {}

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot's states."""
        assert isinstance(self.lane, StateLane)
        return sum(state[0].nbytes for state in self.lane.states)

    def states(self, index: int) -> Tensor:
        """A state of the window's slots before the forward, [B, ...]."""
        assert isinstance(self.lane, StateLane)
        return self.lane.states[index][self.places]


class StateCache(KVCache):
    """Keys and values of attention layers, and the states of recurrent ones.

    Its memory is counted in rows: a slot's states are as many rows as have their bytes. In a model without
    attention rows need no memory, and a slot's states count as one row.

    Args:
        layers: shape of each attention layer's rows; may be empty.
        states: shape of each state of a slot.
        slots, length, capacity: as for ``KVCache``.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        states: Sequence[StateShape],
        slots: int = 1,
        length: int = 256,
        capacity: int | None = None,
    ) -> None:
        self.shapes = list(states)
        self.state_bytes = sum(shape.bytes for shape in states)
        super().__init__(layers, slots, length, capacity)

    # -- memory ------------------------------------------------------------------------------------------

    @property
    def row_bytes(self) -> int:
        return super().row_bytes or self.state_bytes

    def copied_bytes(self, rows: int) -> int:
        return rows * super().row_bytes

    @property
    def bytes(self) -> int:
        return super().bytes + self.state_bytes * sum(lane.places for lane in self._lanes)

    def _new_lane(self, places: int, room: int) -> Lane:
        return StateLane(self._layout, places, room, self.shapes)

    def _rows_of(self, places: int, room: int) -> int:
        rows = room if self.layers else 0
        return places * (rows + math.ceil(self.state_bytes / self.row_bytes))

    # -- rows and states ---------------------------------------------------------------------------------

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        if length != self.length(slot) or path:
            raise OutpaceError(
                f"a recurrent layer's state after {length} of {self.length(slot)} rows is not kept, so the "
                "rows after it cannot be dropped"
            )

    @contextmanager
    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> Iterator[None]:
        if any((ahead or {}).values()):
            raise OutpaceError("rows written ahead of a recurrent layer's state cannot be committed")
        states = {slot: self.read_state(slot) for slot in self._seats}
        try:
            with super().provisional(ahead):
                yield
        finally:
            for slot, state in states.items():
                self.write_state(slot, state)

    def read_rows(self, slot: Slot, start: int, stop: int) -> list[Any]:
        return [stop - start, *super().read_rows(slot, start, stop)]

    def write_rows(self, slot: Slot, block: Any) -> None:
        count, *rows = block
        if rows:
            return super().write_rows(slot, rows)
        seat = self._seat(slot)
        self._reserve(seat, seat.length + count)
        seat.length += count

    def read_state(self, slot: Slot) -> list[Tensor]:
        seat = self._seat(slot)
        return [state[seat.place].clone() for state in self._states_of(seat)]

    def write_state(self, slot: Slot, state: Any) -> None:
        seat = self._seat(slot)
        for old, new in zip(self._states_of(seat), state, strict=True):
            old[seat.place] = new

    @staticmethod
    def _states_of(seat: Seat) -> list[Tensor]:
        assert isinstance(seat.lane, StateLane)
        return seat.lane.states

    # -- the forward -------------------------------------------------------------------------------------

    def _window(self, *args: Any) -> StateWindow:
        return StateWindow(*args)

    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        taken = []
        for window in self._closing(paths):
            assert isinstance(window, StateWindow)
            for sequence, slot in enumerate(window.slots):
                if slot is None or not window.widths[sequence] or not len(path := paths.get(slot, ())):
                    continue
                seat = self._seat(slot)
                for index, made in window.made.items():
                    before = self._states_of(seat)[index][seat.place]  # the window's may be copies
                    taken.append((before, made.at(before, sequence, path)))
        super().keep(paths)
        for before, after in taken:
            before.copy_(after)
