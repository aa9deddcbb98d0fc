"""The cache protocol, and the tensor cache: keys and values of many sequences, with one undo verb, ``keep``.

``Cache`` is what an engine and its drafters use: slots, and how many rows of each are committed. Where the
rows are, and what they look like, is between a target and its cache. ``KVCache`` keeps tensors; it knows
neither a model nor transformers (``targets/causal.py`` adapts it).

Rows that are not finite. Attention multiplies a masked row's value by 0, and 0 x NaN is NaN, so a row that
a mask hides must still be finite. Buffers begin as zeros, padded rows go to a scratch row outside every view,
and rows given back (``free``, ``truncate``) are zeroed: what one sequence computed never reaches another.
Rows that ``keep`` rejects stay until they are written over. If such a row is not finite, then all rows of its
sequence were NaN in the very forward that wrote it, for they share a view. (So in half precision a draft
that overflows can spoil its sequence, where plain decoding would not have met it.)
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.core import OutpaceError

_LEAST_ROOM = 256  # rows of the smallest length class
_LEAST_COLUMNS = 1024  # that a forward of fixed shapes sees, in a lane of as many: fewer shapes
_TOGETHER = 16  # keys and values of layers in one buffer: one copy moves all, one at a time is made anew


class CacheFull(OutpaceError):
    """A cache has no room for a slot, or for more rows of one; nothing has changed."""


class Slot:
    """A sequence's rows in a cache.

    Attributes:
        number: the same for as long as the slot is in use, whatever moves inside the cache.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Slot({self.number})"


class Cache(ABC):
    """Committed rows of many sequences.

    A target's forward adds rows behind a slot's committed ones; ``keep`` closes the forward and commits some.

    Attributes:
        static: fixed shapes; the cache does not grow.
        copies_rows: whether ``read_rows`` and ``write_rows`` work.
        max_slots: sequences that it can hold at once; None for no limit.
        max_length: rows that one slot can have; None for no limit.
        capacity: rows in all that may be reserved; None for no limit.
    """

    static: bool = False
    copies_rows: bool = False
    max_slots: int | None = None
    max_length: int | None = None
    capacity: int | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Slots in use."""

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Rows reserved now."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one row."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory held now."""

    @abstractmethod
    def cost(self, rows: int) -> int:
        """Rows reserved at most for a slot with room for ``rows`` rows that shares nothing with others.

        ``allocate(rows)`` succeeds while ``capacity - reserved`` is at least this.
        """

    @abstractmethod
    def allocate(self, rows: int = 0) -> Slot:
        """Take an empty slot into use, with room for at least ``rows`` rows (0: as the cache was made for).

        Raises:
            CacheFull: no slot is left, or too few rows.
        """

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Give a slot back.

        Raises:
            ValueError: it is not in use.
        """

    @abstractmethod
    def length(self, slot: Slot) -> int:
        """Committed rows."""

    @abstractmethod
    def room(self, slot: Slot) -> int:
        """Rows that a slot has room for without moving, those committed included."""

    @abstractmethod
    def reserve(self, slot: Slot, rows: int) -> None:
        """Make room for at least ``rows`` rows, those committed included.

        Raises:
            CacheFull: too few rows are left.
        """

    @abstractmethod
    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        """Close the forward: of the rows a slot fed (0 .. width - 1) commit its path's, in ascending order.

        The first row of a path is normally 0, the root. A slot without a path keeps none of the rows it fed.
        """

    @abstractmethod
    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        """Forget a slot's rows from ``length`` on, except those of a path, which move up in its order.

        Args:
            path: rows to keep, counted from row ``length``, in ascending order.

        Raises:
            ValueError: the slot has fewer rows.
        """

    @abstractmethod
    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> AbstractContextManager[None]:
        """Commit rows that are given up at the end: a draft that is made behind the committed rows.

        No slot may be taken or given back meanwhile. Rows given up are zeroed, unless ``ahead`` is given.

        Args:
            ahead: slot -> rows behind its committed ones that are there already, and count from the start.
                At the end rows then stay where they are, until they are written over.
        """

    def read_rows(self, slot: Slot, start: int, stop: int) -> Any:
        """A copy of a slot's committed rows ``start`` .. ``stop - 1``, for ``write_rows``.

        Raises:
            OutpaceError: this cache does not copy rows.
        """
        raise OutpaceError(f"a {type(self).__name__} does not copy rows (copies_rows is False)")

    def write_rows(self, slot: Slot, block: Any) -> None:
        """Append rows that ``read_rows`` copied, as committed ones.

        Raises:
            CacheFull: too few rows are left. OutpaceError: this cache does not copy rows.
        """
        raise OutpaceError(f"a {type(self).__name__} does not copy rows (copies_rows is False)")


@dataclass(frozen=True)
class RowShape:
    """Shape of one kind of row, the keys or the values of a layer: [heads, size]."""

    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of a layer may differ in shape (latent attention)."""

    keys: RowShape
    values: RowShape


class _Part(NamedTuple):
    """Rows of one shape that share a buffer: which layers', keys (0) or values (1)."""

    shape: RowShape
    members: list[tuple[int, int]]


@dataclass(eq=False)
class _Seat:
    """Location of a slot's rows.

    Attributes:
        need: rows it must have room for.
        length: committed rows.
        written: rows from here on are zero.
    """

    slot: Slot
    lane: _Lane
    place: int
    need: int
    length: int = 0
    written: int = 0


class _Lane:
    """Slots with the same room, side by side: those at places 0 .. len(seats) - 1 are in use.

    Attributes:
        places: slots that there is room for.
        room: rows of each.
    """

    def __init__(self, parts: list[_Part], places: int, room: int) -> None:
        self.seats: list[_Seat] = []
        self.places = places
        self.room = room
        self._parts = parts
        self.buffers = [_zeros(part, places, room) for part in parts]

    @property
    def rows(self) -> int:
        return self.places * self.room

    def resize(self, places: int, room: int) -> None:
        """Change the places, the room, or both. Beside the new rows only one old buffer is held at a time."""
        if (places, room) == (self.places, self.room):
            return
        used, rows = len(self.seats), max((seat.written for seat in self.seats), default=0)
        for index, part in enumerate(self._parts):
            old = self.buffers[index]
            self.buffers[index] = _zeros(part, places, room)
            self.buffers[index][:, :used, :, :rows] = old[:, :used, :, :rows]
        self.places, self.room = places, room

    def enter(self, seat: _Seat) -> None:
        """Seat a slot at the next place."""
        seat.lane, seat.place = self, len(self.seats)
        self.seats.append(seat)

    def take_over(self, seat: _Seat) -> None:
        """Move a slot from its lane to the next place of this one."""
        old, place = seat.lane, seat.place
        self.enter(seat)
        self._copy(old, place, seat.place, seat.written)
        old.leave(place, seat.written)

    def leave(self, place: int, written: int) -> None:
        """Free a place; the last slot moves there. ``written``: rows written at the place."""
        last = self.seats.pop()
        self._clear(place, 0, written)
        if place < len(self.seats):
            self._copy(self, last.place, place, last.written)
            self._clear(last.place, 0, last.written)
            self.seats[place] = last
            last.place = place

    def _copy(self, source: _Lane, place: int, target: int, rows: int) -> None:
        for old, new in zip(source.buffers, self.buffers, strict=True):
            new[:, target, :, :rows] = old[:, place, :, :rows]

    def _clear(self, place: int, start: int, end: int) -> None:
        if end > start:
            for buffer in self.buffers:
                buffer[:, place, :, start:end] = 0

    def clear(self, seat: _Seat, start: int) -> None:
        """Zero what was written for a slot from row ``start`` on."""
        self._clear(seat.place, start, seat.written)
        seat.written = min(seat.written, start)

    def move(self, places: list[int], sources: list[int], targets: list[int]) -> None:
        """Copy rows within their slots. All are read before any is written."""
        made, devices = torch.tensor([places, sources, targets]), {part.shape.device for part in self._parts}
        indices = {device: made.to(device, non_blocking=True) for device in devices}
        for part, buffer in zip(self._parts, self.buffers, strict=True):
            place, source, target = indices[part.shape.device].unbind()
            buffer[:, place, :, target] = buffer[:, place, :, source]

    def by_layer(self, places: slice, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, parts of its [places, heads, room + 1, size]: views."""
        views: dict[tuple[int, int], Tensor] = {}
        for part, buffer in zip(self._parts, self.buffers, strict=True):
            # One slice and one unbind for all layers: a slice for each would cost more than the write.
            views.update(zip(part.members, buffer[:, places, :, rows].unbind(), strict=True))
        return [(views[layer, 0], views[layer, 1]) for layer in range(len(views) // 2)]


def _zeros(part: _Part, places: int, room: int) -> Tensor:
    # Outside inference mode, so that it can be written under either grad mode. The last row is scratch.
    with torch.inference_mode(False):
        size = (len(part.members), places, part.shape.heads, room + 1, part.shape.size)
        return torch.zeros(size, dtype=part.shape.dtype, device=part.shape.device)


def _parts(layers: Sequence[LayerShape]) -> list[_Part]:
    """The kinds of rows by shape, at most ``_TOGETHER`` in one buffer."""
    groups: dict[RowShape, list[tuple[int, int]]] = {}
    for layer, shape in enumerate(layers):
        groups.setdefault(shape.keys, []).append((layer, 0))
        groups.setdefault(shape.values, []).append((layer, 1))
    return [
        _Part(shape, group[first : first + _TOGETHER])
        for shape, group in groups.items()
        for first in range(0, len(group), _TOGETHER)
    ]


class KVCache(Cache):
    """Keys and values as tensors: a layer's rows of a forward are written in place and read as views.

    Slots lie in lanes by length class (powers of two from 256 rows). A forward over slots of several lanes
    runs the model once per lane, so short sequences neither hold nor attend over the rows of a long one. A
    lane may be up to ``spread`` times as wide as its least demanding slot needs: one forward over some
    columns more is cheaper than two (docs/adr/0013). A slot that outgrows that moves alone.

    Memory. ``reserved`` never exceeds ``capacity``. A slot that moves holds its old and its new rows. A lane
    that is widened, or gets places (it doubles them, as far as the capacity allows), is copied one buffer of
    8 layers at a time: beside the rows reserved, memory then holds the old rows of 8 layers of that lane.
    Lanes shrink when three quarters of their places are free and go with their last slot; with no slot in use
    the cache holds what it was made with.

    A forward is opened by ``begin(widths)``, which gives one ``Window`` per lane. ``keep`` closes it.

    Args:
        layers: shape of each layer's rows.
        slots: sequences to make room for at once.
        length: rows to make room for in each of these slots, those of a draft included.
        static: buffers that never move, for forwards of fixed shapes: one lane, of which such a forward
            covers slots and rows by powers of two; outgrowing it is an error.
        capacity: rows that may be reserved in all; None for no limit.
        spread: 1 keeps slots strictly by class; ``math.inf`` keeps all slots in one lane.

    Raises:
        OutpaceError: the capacity is less than ``slots * length``.
    """

    copies_rows = True

    def __init__(
        self,
        layers: Sequence[LayerShape],
        slots: int = 1,
        length: int = 256,
        static: bool = False,
        capacity: int | None = None,
        spread: float = 4,
    ) -> None:
        self.layers = list(layers)
        self._first = (max(slots, 1), max(length, 1))  # places and room of the lane it begins with
        self.static = static
        if static:
            self.max_slots, self.max_length = self._first
        self.capacity = capacity
        self.spread = spread
        if capacity is not None and math.prod(self._first) > capacity:
            raise OutpaceError(
                f"{slots} slots of {length} rows are more than the capacity of {capacity} rows; make "
                "the cache with fewer slots, less length or more capacity"
            )
        self._layout = _parts(self.layers)
        self._lanes = [_Lane(self._layout, *self._first)]
        self._seats: dict[Slot, _Seat] = {}
        self._windows: list[Window] | None = None  # of the open forward
        self._open: dict[Slot, int] = {}  # rows that each slot fed to it

    # -- memory ------------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        return sum(lane.rows for lane in self._lanes)

    @property
    def row_bytes(self) -> int:
        kinds = [kind for layer in self.layers for kind in (layer.keys, layer.values)]
        return sum(kind.heads * kind.size * kind.dtype.itemsize for kind in kinds)

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for lane in self._lanes for buffer in lane.buffers)

    def cost(self, rows: int) -> int:
        if self.static:
            return self._first[1]
        room = max(_LEAST_ROOM, 1 << max(rows - 1, 0).bit_length())
        return room if self.capacity is None else max(min(room, self.capacity), rows)

    def _lane_for(self, need: int, own: _Seat | None = None) -> _Lane | None:
        """A lane with room for ``need`` rows, and for a slot besides those in it; None where there is none.

        Args:
            own: the seat that needs the room: in its own lane it needs no other place.
        """
        if self.static:
            lane = self._lanes[0]
            return lane if need <= lane.room and (own or len(lane.seats) < lane.places) else None
        room = self.cost(need)
        options: list[tuple[int, int, _Lane]] = []
        for lane in self._lanes:
            others = [seat.need for seat in lane.seats if seat is not own]
            wide = lane.room if need <= lane.room else room
            if wide > self.spread * self.cost(min([need, *others])):
                if others:
                    continue
                wide = room
            options.append((wide, len(others) + 1, lane))
        # The least wide first; of these one that need not be widened.
        options.sort(key=lambda option: (option[0], option[0] != option[2].room))
        # A new lane of the class; or, where little is left, of just what is needed.
        options += [(wide, 1, _Lane(self._layout, 0, 0)) for wide in (room, need)]
        for wide, count, lane in options:
            for places in (lane.places if count <= lane.places else max(count, 2 * lane.places), count):
                if self.capacity is None or self.reserved - lane.rows + places * wide <= self.capacity:
                    lane.resize(places, wide)
                    if lane not in self._lanes:
                        self._lanes.append(lane)
                    return lane
        return None

    def _make_room(self, need: int, own: _Seat | None = None) -> _Lane:
        lane = self._lane_for(need, own)
        if lane is None and not self.static:
            for some in list(self._lanes):  # free places make room for what is needed
                self._shrink(some, len(some.seats))
            lane = self._lane_for(need, own)
        if lane is None and self.static:
            raise CacheFull(
                f"the static cache holds {self.max_slots} sequences of {self.max_length} rows; make it with "
                f"slots >= {len(self) + (own is None)} and length >= {max(need, self._first[1])}"
            )
        if lane is None:
            raise CacheFull(
                f"{need} rows for a sequence do not fit: {self.reserved} of {self.capacity} rows are reserved"
                "; wait for others to end, or make the cache with more capacity"
            )
        return lane

    def _shrink(self, lane: _Lane, places: int) -> None:
        if places:
            lane.resize(places, lane.room)
        else:
            self._lanes.remove(lane)

    def _left(self, lane: _Lane) -> None:
        """Give memory back after a slot has left a lane."""
        if self.static:
            return
        if not self._seats:
            first = self._lanes[0]
            if len(self._lanes) > 1 or (first.places, first.room) != self._first:
                self._lanes = []  # before the new one is made
                self._lanes = [_Lane(self._layout, *self._first)]
        elif not lane.seats:
            self._shrink(lane, 0)
        elif lane.places > self._first[0] and len(lane.seats) * 4 <= lane.places:
            self._shrink(lane, 2 * len(lane.seats))

    # -- slots -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._seats)

    def _seat(self, slot: Slot) -> _Seat:
        if slot not in self._seats:
            raise ValueError("this slot is not in use")
        return self._seats[slot]

    def allocate(self, rows: int = 0) -> Slot:
        need = rows or self._first[1]
        lane = self._make_room(need)
        used = {slot.number for slot in self._seats}
        slot = Slot(next(number for number in itertools.count() if number not in used))
        seat = self._seats[slot] = _Seat(slot, lane, 0, need)
        lane.enter(seat)
        return slot

    def free(self, slot: Slot) -> None:
        seat = self._seat(slot)
        del self._seats[slot]
        seat.lane.leave(seat.place, seat.written)
        self._left(seat.lane)

    def length(self, slot: Slot) -> int:
        return self._seat(slot).length

    def room(self, slot: Slot) -> int:
        return self._seat(slot).lane.room

    def reserve(self, slot: Slot, rows: int) -> None:
        self._reserve(self._seat(slot), rows)

    def _reserve(self, seat: _Seat, rows: int) -> None:
        if rows > seat.lane.room:
            lane, old = self._make_room(rows, seat), seat.lane
            if lane is not old:
                lane.take_over(seat)
                self._left(old)
        seat.need = max(seat.need, rows)

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        seat = self._seat(slot)
        most = seat.length
        if not 0 <= length <= most or any(not 0 <= row < most - length for row in path):
            raise ValueError(f"cannot keep {length} rows and {list(path)} after them of {most} rows")
        moved = [(length + row, length + place) for place, row in enumerate(path) if row != place]
        if moved:
            sources, targets = zip(*moved, strict=True)
            seat.lane.move([seat.place] * len(moved), list(sources), list(targets))
        seat.length = length + len(path)
        seat.lane.clear(seat, seat.length)

    @contextmanager
    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> Iterator[None]:
        lengths = {slot: seat.length for slot, seat in self._seats.items()}
        for slot, rows in (ahead or {}).items():
            self._seat(slot).length += rows
        try:
            yield
        finally:
            for slot, length in lengths.items():
                seat = self._seats[slot]
                if ahead is None and seat.length > length:
                    seat.lane.clear(seat, length)
                seat.length = length

    # -- the forward -------------------------------------------------------------------------------------

    def begin(self, widths: Mapping[Slot, int], pad_to: int = 0, multiple: int = 1) -> list[Window]:
        """Open a forward; a window per lane.

        Args:
            widths: rows that each slot feeds, at least one of them any.
            pad_to: least width of the forward. In a static cache one above 0 asks for fixed shapes.
            multiple: the rows of a window, over all its slots, are padded to a multiple of this.

        Raises:
            CacheFull: no room for the rows.
        """
        seats = {self._seat(slot): width for slot, width in widths.items() if width}
        for seat, width in seats.items():
            self._reserve(seat, seat.length + width)
        lanes: dict[_Lane, dict[int, int]] = {}
        for seat, width in seats.items():
            lanes.setdefault(seat.lane, {})[seat.place] = width
            seat.written = max(seat.written, seat.length + width)
        self._open = {seat.slot: width for seat, width in seats.items()}
        fixed = self.static and pad_to > 0
        self._windows = [Window(lane, places, pad_to, fixed, multiple) for lane, places in lanes.items()]
        return self._windows

    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        if self._windows is None:
            raise RuntimeError("keep without a forward: call begin first")
        for slot, path in paths.items():
            if len(path) and not max(path) < self._open.get(slot, 0):
                raise ValueError(f"{slot} fed {self._open.get(slot, 0)} rows, so it cannot keep {list(path)}")
        for window in self._windows:
            places, sources, targets = [], [], []
            for seat in filter(None, window.seats):
                path = paths.get(seat.slot, ())
                for row, source in enumerate(path):
                    if row != source:
                        places.append(seat.place)
                        sources.append(seat.length + source)
                        targets.append(seat.length + row)
                seat.length += len(path)
            if places:
                window.lane.move(places, sources, targets)
        self._windows = None

    # -- rows --------------------------------------------------------------------------------------------

    def views(self, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Committed keys and values of each layer, of slots at places start .. stop - 1 of the first lane.

        Views, each [stop - start, heads, longest, size]; what lies behind a shorter slot's rows is finite.
        """
        lane = self._lanes[0]
        longest = max(seat.length for seat in lane.seats[start:stop])
        return lane.by_layer(slice(start, stop), slice(longest))

    def rows(self, layer: int, slot: Slot) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one slot, copies, each [1, heads, length, size]."""
        seat = self._seat(slot)
        at = slice(seat.place, seat.place + 1)
        keys, values = seat.lane.by_layer(at, slice(seat.length))[layer]
        return keys.clone(), values.clone()

    def read_rows(self, slot: Slot, start: int, stop: int) -> list[Tensor]:
        """Each buffer's, [layers, heads, stop - start, size]."""
        seat = self._seat(slot)
        if not 0 <= start <= stop <= seat.length:
            raise ValueError(f"rows {start} to {stop} of {seat.length}")
        return [buffer[:, seat.place, :, start:stop].clone() for buffer in seat.lane.buffers]

    def write_rows(self, slot: Slot, block: Iterable[Tensor]) -> None:
        seat, rows = self._seat(slot), list(block)
        start, stop = seat.length, seat.length + rows[0].shape[2]
        self._reserve(seat, stop)
        for buffer, own in zip(seat.lane.buffers, rows, strict=True):
            buffer[:, seat.place, :, start:stop] = own
        seat.length = stop
        seat.written = max(seat.written, stop)


class Place(NamedTuple):
    """Location of a sequence's rows: a cache and a slot in it."""

    cache: Cache
    slot: Slot

    @property
    def rows(self) -> int:
        """Committed rows."""
        return self.cache.length(self.slot)


class Window:
    """The rows of a forward over slots of one lane: slot i feeds ``widths[i]`` rows from ``offsets[i]`` on.

    Attributes:
        lane: where they are.
        start, stop: the places that the forward covers; a slot there that feeds nothing has width 0. With
            fixed shapes ``start`` is 0 and ``stop`` a power of two, or the number of places.
        slots: those at these places; None where none is in use.
        width: rows of the forward, for each slot; those past a slot's own are padding.
        columns: rows of the cache that its attention sees, from 0 on. With fixed shapes a power of two, at
            least 1024, or the lane's room.
        span: where the new rows lie, if that is the same for all and there is no padding.
    """

    def __init__(
        self,
        lane: _Lane,
        widths: Mapping[int, int],
        pad_to: int = 0,
        fixed: bool = False,
        multiple: int = 1,
    ) -> None:
        self.lane = lane
        self.start, self.stop = min(widths), max(widths) + 1
        if fixed:
            self.start, self.stop = 0, min(power_of_two(self.stop), lane.places)
        covered = range(self.start, self.stop)
        self.seats = [lane.seats[place] if place < len(lane.seats) else None for place in covered]
        self.slots = [None if seat is None else seat.slot for seat in self.seats]
        self.widths = [widths.get(place, 0) for place in covered]
        self.offsets = [0 if seat is None else seat.length for seat in self.seats]
        step = multiple // math.gcd(multiple, len(covered))
        self.width = -(-max(*widths.values(), pad_to) // step) * step
        self.columns = max(o + w for o, w in zip(self.offsets, self.widths, strict=True) if w)
        if fixed:
            self.columns = min(max(power_of_two(self.columns), _LEAST_COLUMNS), lane.room)
        first = self.offsets[0]
        even = {*self.offsets} == {first} and {*self.widths} == {self.width}
        self.span = slice(first, first + self.width) if even and not fixed else None
        self._written: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def places(self) -> slice:
        return slice(self.start, self.stop)

    @cached_property
    def _targets(self) -> list[tuple[Tensor, Tensor]]:
        return self.lane.by_layer(self.places, self.span or slice(None))

    @cached_property
    def _views(self) -> list[tuple[Tensor, Tensor]]:
        return self.lane.by_layer(self.places, slice(self.columns))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows, each [B, heads, width, size]; returns views [B, heads, columns, size]."""
        for target, rows in zip(self._targets[layer], (keys, values), strict=True):
            if self.span is not None:
                target.copy_(rows)
            else:
                sequences, places = self.written(target.device)
                # Advanced indices around a slice go first: [B, width, heads, size].
                target[sequences, :, places] = rows.transpose(1, 2)
        return self._views[layer]

    def written(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Indices of the rows to write: sequences [B, 1] and rows [B, width]; padding goes to scratch."""
        if device not in self._written:
            scratch = self.lane.room
            rows = [
                [*range(offset, offset + width), *[scratch] * (self.width - width)]
                for offset, width in zip(self.offsets, self.widths, strict=True)
            ]
            sequences = torch.arange(len(rows), device=device)[:, None]
            self._written[device] = sequences, torch.tensor(rows).to(device, non_blocking=True)
        return self._written[device]


class FixedRows:
    """Rows that forwards of one fixed shape write and read, step after step: as ``Window``, made once.

    Args:
        window: of the first such forward.
        device: where it is told which rows are written.

    Attributes:
        rows: of the cache, that are written, [B, width]; set before a forward.
    """

    def __init__(self, window: Window, device: torch.device) -> None:
        self.width, self.columns, self.scratch = window.width, window.columns, window.lane.room
        self.sequences = torch.arange(window.stop, device=device)[:, None]
        self.rows = self.sequences  # until a forward sets it
        self._targets = window.lane.by_layer(window.places, slice(None))
        self._views = window.lane.by_layer(window.places, slice(window.columns))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows, each [B, heads, width, size]; returns views [B, heads, columns, size]."""
        for target, new in zip(self._targets[layer], (keys, values), strict=True):
            sequences, rows = self.sequences.to(target.device), self.rows.to(target.device)
            target[sequences, :, rows] = new.transpose(1, 2)
        return self._views[layer]


def power_of_two(number: int) -> int:
    """The power of two at or above a number."""
    return 1 << max(number - 1, 0).bit_length()
