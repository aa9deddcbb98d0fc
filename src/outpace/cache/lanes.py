"""Tensors of the rows of many slots: lanes of slots with the same room, and a forward's window of one.

Non-finite rows. Attention multiplies a masked row's value by 0, and 0 x NaN is NaN, so a masked row must
still be finite. Buffers are initialised to zeros, padded rows go to a scratch row outside every view, and
released rows (``free``, ``truncate``) are zeroed: no sequence reads values that another computed. Rows that
``keep`` rejects stay until they are overwritten. If such a row is not finite, all rows of its sequence were
already NaN in the forward that wrote it, since they share a view. (So in half precision a draft that
overflows can spoil its sequence, which plain decoding would not.)
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.cache.base import Slot
from outpace.native import move
from outpace.native.pointers import address, check, pointer
from outpace.transfer import upload

_LARGE = 1 << 20  # bytes of a buffer that is not written when it is made
_TOGETHER = 16  # keys and values per buffer: one copy moves all, and buffers are resized one at a time


@dataclass(frozen=True)
class RowShape:
    """Shape of a key row or a value row of a layer: [heads, size]."""

    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LayerShape:
    """Shapes of a layer's keys and values, which may differ (latent attention)."""

    keys: RowShape
    values: RowShape


class BufferLayout(NamedTuple):
    """Rows of one shape that share a buffer: pairs of a layer, and 0 for its keys or 1 for its values."""

    shape: RowShape
    members: list[tuple[int, int]]


@dataclass(eq=False)
class Seat:
    """Location of a slot's rows.

    Attributes:
        need: number of rows it must have room for.
        length: number of committed rows.
        written: rows from this index on are zero.
    """

    slot: Slot
    lane: Lane
    place: int
    need: int
    length: int = 0
    written: int = 0


class LaneMemory:
    """The memory of a lane until it moves: the key of what is captured over it, which goes with it."""


class Lane:
    """Slots with the same room, side by side: those at places 0 .. len(seats) - 1 are in use.

    Attributes:
        places: number of slots that there is room for.
        room: rows per slot.
        memory: another one once the buffers have moved.
    """

    def __init__(self, layouts: list[BufferLayout], places: int, room: int) -> None:
        self.seats: list[Seat] = []
        self.places = places
        self.room = room
        self._layouts = layouts
        self.buffers = [_zeros(layout, places, room) for layout in layouts]
        self.memory = LaneMemory()

    def resize(self, places: int, room: int) -> None:
        """Change the places, the room, or both, one buffer at a time to limit peak memory; all or none."""
        before = self.places, self.room
        if (places, room) == before:
            return
        self.memory = LaneMemory()  # first: what was captured holds the old buffers
        try:
            for index in range(len(self.buffers)):
                self._resize(index, places, room)
            self.places, self.room = places, room
        except BaseException:
            for index, buffer in enumerate(self.buffers):
                if (buffer.shape[1], buffer.shape[3] - 1) != before:
                    self._resize(index, *before)
            raise

    def _resize(self, index: int, places: int, room: int) -> None:
        used, rows = len(self.seats), max((seat.written for seat in self.seats), default=0)
        new = _zeros(self._layouts[index], places, room)
        new[:, :used, :, :rows] = self.buffers[index][:, :used, :, :rows]
        self.buffers[index] = new

    def enter(self, seat: Seat) -> None:
        """Seat a slot at the next place."""
        seat.lane, seat.place = self, len(self.seats)
        self.seats.append(seat)

    def take_over(self, seat: Seat) -> None:
        """Move a slot from its lane to the next place of this one."""
        old, place = seat.lane, seat.place
        self.enter(seat)
        self._copy(old, place, seat.place, seat.written)
        old.leave(place, seat.written)

    def leave(self, place: int, written: int) -> None:
        """Free a place, with ``written`` rows there to clear; the last slot moves to it."""
        last = self.seats.pop()
        self._clear(place, 0, written)
        if place < len(self.seats):
            self._copy(self, last.place, place, last.written)
            self._clear(last.place, 0, last.written)
            self.seats[place] = last
            last.place = place

    def _copy(self, source: Lane, place: int, target: int, rows: int) -> None:
        for old, new in zip(source.buffers, self.buffers, strict=True):
            new[:, target, :, :rows] = old[:, place, :, :rows]

    def _clear(self, place: int, start: int, end: int) -> None:
        if end > start:
            for buffer in self.buffers:
                buffer[:, place, :, start:end] = 0

    def clear(self, seat: Seat, start: int) -> None:
        """Zero what was written for a slot from row ``start`` on."""
        self._clear(seat.place, start, seat.written)
        seat.written = min(seat.written, start)

    def move(self, places: list[int], sources: list[int], targets: list[int]) -> None:
        """Copy rows within their slots, one by one: no target is the source of a later move."""
        devices = {layout.shape.device for layout in self._layouts}
        if devices == {torch.device("cpu")} and not isinstance(functions := move.functions(), str):
            moves = np.array([places, sources, targets], np.int64)
            moved, last = (moves[0], self.places - 1), (moves[1:], self.room)
            inside = all(
                0 <= each.min(initial=0) <= each.max(initial=0) <= most for each, most in (moved, last)
            )
            check(inside, f"rows 0 to {self.room} of {self.places} slots")
            given = [address(each, np.int64, len(places)) for each in moves]
            for layout, buffer in zip(self._layouts, self.buffers, strict=True):
                layers, heads = len(layout.members), layout.shape.heads
                start = pointer(
                    buffer, layout.shape.dtype, layers, self.places, heads, self.room + 1, layout.shape.size
                )
                strides = [stride * buffer.itemsize for stride in buffer.stride()[:4]]
                functions.move_rows(start, layers, heads, *strides, len(places), *given)
            return
        made = torch.tensor([places, sources, targets])
        indices = {device: upload(made, device) for device in devices}
        for layout, buffer in zip(self._layouts, self.buffers, strict=True):
            place, source, target = indices[layout.shape.device].unbind()
            buffer[:, place, :, target] = buffer[:, place, :, source]

    def by_layer(self, places: slice, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Views of each layer's keys and values, slices of its [places, heads, room + 1, size]."""
        views: dict[tuple[int, int], Tensor] = {}
        for layout, buffer in zip(self._layouts, self.buffers, strict=True):
            # One slice and one unbind for all layers: a slice per layer would cost more than the write.
            views.update(zip(layout.members, buffer[:, places, :, rows].unbind(), strict=True))
        return [(views[layer, 0], views[layer, 1]) for layer in range(len(views) // 2)]


def _zeros(layout: BufferLayout, places: int, room: int) -> Tensor:
    # Outside inference mode, so that it can be written in and outside of it. The last row is scratch.
    with torch.inference_mode(False):
        size = (len(layout.members), places, layout.shape.heads, room + 1, layout.shape.size)
        count = math.prod(size) * layout.shape.dtype.itemsize
        if layout.shape.device.type != "cpu" or count < _LARGE or sys.platform == "win32":
            return torch.zeros(size, dtype=layout.shape.dtype, device=layout.shape.device)
        # The system zeroes a page when it is first used. torch.zeros would write all of them now, while other
        # sequences wait: 20 ms for 50 MB.
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=layout.shape.dtype).view(size)


def buffer_layouts(layers: Sequence[LayerShape]) -> list[BufferLayout]:
    """Group the layers' keys and values by shape, at most ``_TOGETHER`` per buffer."""
    groups: dict[RowShape, list[tuple[int, int]]] = {}
    for layer, shape in enumerate(layers):
        groups.setdefault(shape.keys, []).append((layer, 0))
        groups.setdefault(shape.values, []).append((layer, 1))
    return [
        BufferLayout(shape, group[first : first + _TOGETHER])
        for shape, group in groups.items()
        for first in range(0, len(group), _TOGETHER)
    ]


class Window:
    """The rows of a forward over slots of one lane: slot i feeds ``widths[i]`` rows from ``offsets[i]`` on.

    Attributes:
        lane: the slots' lane.
        places: the places that the forward covers. Keys and values of a range are read where they are, those
            of a list are copied for each layer.
        slots: the slots at these places; None for a free place. One that feeds no rows has width 0.
        width: rows of the forward per slot; those beyond a slot's own width are padding.
        columns: number of cache rows that attention covers, from row 0.
        span: the new rows' range, if it is the same for all slots and there is no padding.

    Args:
        widths: number of rows that each place feeds.
        covered: the places.
        multiple: the number of rows, over all places, is padded to a multiple of this.
        least: minimum width.
    """

    def __init__(
        self,
        lane: Lane,
        widths: Mapping[int, int],
        covered: range | list[int],
        multiple: int = 1,
        least: int = 1,
    ) -> None:
        self.lane = lane
        self.places = slice(covered.start, covered.stop) if isinstance(covered, range) else covered
        self.seats = [lane.seats[place] if place < len(lane.seats) else None for place in covered]
        self.slots = [None if seat is None else seat.slot for seat in self.seats]
        self.widths = [widths.get(place, 0) for place in covered]
        self.offsets = [0 if seat is None else seat.length for seat in self.seats]
        step = multiple // math.gcd(multiple, len(covered))
        self.width = -(-max(*widths.values(), least) // step) * step
        self.columns = max(o + w for o, w in zip(self.offsets, self.widths, strict=True) if w)
        first = self.offsets[0]
        even = {*self.offsets} == {first} and {*self.widths} == {self.width}
        even = even and isinstance(self.places, slice)
        self.span = slice(first, first + self.width) if even else None
        self._written: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def start(self) -> int:
        """The first place of a range."""
        assert isinstance(self.places, slice)
        start: int = self.places.start
        return start

    @property
    def stop(self) -> int:
        """The place after a range."""
        assert isinstance(self.places, slice)
        stop: int = self.places.stop
        return stop

    @cached_property
    def _targets(self) -> list[tuple[Tensor, Tensor]]:
        places = self.places if isinstance(self.places, slice) else slice(None)
        return self.lane.by_layer(places, self.span or slice(None))

    @cached_property
    def _views(self) -> list[tuple[Tensor, Tensor]]:
        assert isinstance(self.places, slice)
        return self.lane.by_layer(self.places, slice(self.columns))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows, each [B, heads, width, size]; returns all, [B, heads, columns, size]."""
        for target, rows in zip(self._targets[layer], (keys, values), strict=True):
            if self.span is not None:
                target.copy_(rows)
            else:
                sequences, places = self.written(target.device)
                # The dimensions of advanced indices around a slice come first: [B, width, heads, size].
                target[sequences, :, places] = rows.transpose(1, 2)
        if isinstance(self.places, slice):
            return self._views[layer]
        kept, seen = self._targets[layer]
        return kept[self.places, :, : self.columns], seen[self.places, :, : self.columns]

    def written(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Indices of the rows to write: sequences [B, 1], rows [B, width]; padding goes to scratch."""
        if device not in self._written:
            scratch = self.lane.room
            rows = [
                [*range(offset, offset + width), *[scratch] * (self.width - width)]
                for offset, width in zip(self.offsets, self.widths, strict=True)
            ]
            fed = range(len(rows)) if isinstance(self.places, slice) else self.places
            places, sequences = torch.tensor(rows), torch.tensor(fed)[:, None]
            self._written[device] = upload(sequences, device), upload(places, device)
        return self._written[device]


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least a number."""
    return 1 << max(number - 1, 0).bit_length()
