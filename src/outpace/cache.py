"""The cache protocol and the tensor cache: keys and values of many sequences, rolled back by ``keep``.

``Cache`` is the interface for an engine and its drafters: slots, and the number of committed rows of each.
The location and format of the rows are private to a target and its cache. ``KVCache`` stores tensors and is
independent of models and transformers (``targets/causal.py`` adapts it).

Non-finite rows. Attention multiplies a masked row's value by 0, and 0 x NaN is NaN, so a masked row must
still be finite. Buffers are initialised to zeros, padded rows go to a scratch row outside every view, and
released rows (``free``, ``truncate``) are zeroed: no sequence reads values that another computed. Rows that
``keep`` rejects stay until they are overwritten. If such a row is not finite, all rows of its sequence were
already NaN in the forward that wrote it, since they share a view. (So in half precision a draft that
overflows can spoil its sequence, which plain decoding would not.)
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
_LEAST_COLUMNS = 1024  # minimum columns of a forward of fixed shapes, if the lane has that many: fewer shapes
_TOGETHER = 16  # keys and values per buffer: one copy moves all, and buffers are resized one at a time


class CacheFull(OutpaceError):
    """A cache has no room for a slot, or for more rows of one; its state is unchanged."""


class Slot:
    """A sequence's rows in a cache.

    Attributes:
        number: constant while the slot is in use, even if its rows move inside the cache.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Slot({self.number})"


class Cache(ABC):
    """Committed rows of many sequences.

    A target's forward adds rows after a slot's committed ones; ``keep`` closes the forward and commits some.

    Attributes:
        static: fixed shapes; the cache does not grow.
        copies_rows: True if ``read_rows`` and ``write_rows`` are supported.
        max_slots: maximum number of slots in use; None for no limit.
        max_length: maximum number of rows per slot; None for no limit.
        capacity: maximum total number of reserved rows; None for no limit.
    """

    static: bool = False
    copies_rows: bool = False
    max_slots: int | None = None
    max_length: int | None = None
    capacity: int | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Number of slots in use."""

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Number of rows reserved now."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes per row."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes allocated now."""

    @abstractmethod
    def cost(self, rows: int) -> int:
        """Maximum number of rows reserved for a slot with room for ``rows`` rows that shares none of them.

        ``allocate(rows)`` succeeds while ``capacity - reserved`` is at least this.
        """

    @abstractmethod
    def allocate(self, rows: int = 0) -> Slot:
        """Take an empty slot into use, with room for at least ``rows`` rows (0: the cache's initial length).

        Raises:
            CacheFull: no slot is left, or too few rows.
        """

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Release a slot.

        Raises:
            ValueError: it is not in use.
        """

    @abstractmethod
    def length(self, slot: Slot) -> int:
        """Number of committed rows."""

    @abstractmethod
    def room(self, slot: Slot) -> int:
        """Number of rows that a slot has room for without moving, including committed ones."""

    @abstractmethod
    def reserve(self, slot: Slot, rows: int) -> None:
        """Make room for at least ``rows`` rows, including committed ones.

        Raises:
            CacheFull: too few rows are left.
        """

    @abstractmethod
    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        """Close the forward: commit each slot's path among the rows that it fed (0 .. width - 1).

        Paths are in ascending order; their first row is normally 0, the root. A slot without a path keeps
        none of the rows it fed.
        """

    @abstractmethod
    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        """Drop a slot's rows from ``length`` on, except those of a path, which move to ``length`` and after.

        Args:
            path: rows to keep, counted from row ``length``, in ascending order.

        Raises:
            ValueError: the slot has fewer rows.
        """

    @abstractmethod
    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> AbstractContextManager[None]:
        """Context in which committed rows are temporary: on exit they are dropped, as for making a draft.

        No slot may be allocated or freed inside it. Dropped rows are zeroed, unless ``ahead`` is given.

        Args:
            ahead: slot -> number of rows already written after its committed ones, which count as committed
                from the start. On exit, dropped rows are then left until they are overwritten.
        """

    def read_rows(self, slot: Slot, start: int, stop: int) -> Any:
        """Copy a slot's committed rows ``start`` .. ``stop - 1``, for ``write_rows``.

        Raises:
            OutpaceError: this cache does not copy rows.
        """
        raise OutpaceError(f"a {type(self).__name__} does not copy rows (copies_rows is False)")

    def write_rows(self, slot: Slot, block: Any) -> None:
        """Append rows copied by ``read_rows``, as committed ones.

        Raises:
            CacheFull: too few rows are left. OutpaceError: this cache does not copy rows.
        """
        raise OutpaceError(f"a {type(self).__name__} does not copy rows (copies_rows is False)")


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


class _Part(NamedTuple):
    """Rows of one shape that share a buffer: pairs of a layer, and 0 for its keys or 1 for its values."""

    shape: RowShape
    members: list[tuple[int, int]]


@dataclass(eq=False)
class _Seat:
    """Location of a slot's rows.

    Attributes:
        need: number of rows it must have room for.
        length: number of committed rows.
        written: rows from this index on are zero.
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
        places: number of slots that there is room for.
        room: rows per slot.
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
        """Change the places, the room, or both, one buffer at a time to limit peak memory."""
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
        """Free a place, with ``written`` rows there to clear; the last slot moves to it."""
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
        """Copy rows within their slots; all are read before any is written."""
        made, devices = torch.tensor([places, sources, targets]), {part.shape.device for part in self._parts}
        indices = {device: made.to(device, non_blocking=True) for device in devices}
        for part, buffer in zip(self._parts, self.buffers, strict=True):
            place, source, target = indices[part.shape.device].unbind()
            buffer[:, place, :, target] = buffer[:, place, :, source]

    def by_layer(self, places: slice, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Views of each layer's keys and values, slices of its [places, heads, room + 1, size]."""
        views: dict[tuple[int, int], Tensor] = {}
        for part, buffer in zip(self._parts, self.buffers, strict=True):
            # One slice and one unbind for all layers: a slice per layer would cost more than the write.
            views.update(zip(part.members, buffer[:, places, :, rows].unbind(), strict=True))
        return [(views[layer, 0], views[layer, 1]) for layer in range(len(views) // 2)]


def _zeros(part: _Part, places: int, room: int) -> Tensor:
    # Outside inference mode, so that it can be written in and outside of it. The last row is scratch.
    with torch.inference_mode(False):
        size = (len(part.members), places, part.shape.heads, room + 1, part.shape.size)
        return torch.zeros(size, dtype=part.shape.dtype, device=part.shape.device)


def _parts(layers: Sequence[LayerShape]) -> list[_Part]:
    """Group the layers' keys and values by shape, at most ``_TOGETHER`` per buffer."""
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

    Slots are grouped in lanes by length class (powers of two from 256 rows). A forward over slots of several
    lanes runs the model once per lane, so short sequences neither reserve nor attend over as many rows as a
    long one. A lane may be up to ``spread`` times as wide as its shortest slot needs: one forward over a few
    more columns is cheaper than two (docs/adr/0013). A slot that outgrows this limit moves to another lane.

    Memory. ``reserved`` never exceeds ``capacity``. A slot that moves occupies its old and its new rows. A
    lane that is widened, or gets more places (their number doubles if the capacity allows), is copied one
    buffer of 8 layers at a time: besides the reserved rows, memory then contains the old rows of 8 layers of
    that lane. A lane shrinks when three quarters of its places are free and is removed with its last slot;
    with no slot in use the cache has its initial size.

    A forward is opened by ``begin(widths)``, which returns one ``Window`` per lane. ``keep`` closes it.

    Args:
        layers: shape of each layer's rows.
        slots: number of slots to make room for.
        length: rows per slot to make room for, including those of a draft.
        static: buffers that never move, for forwards of fixed shapes: a single lane, of which such a forward
            covers a power of two of slots and rows; outgrowing it is an error.
        capacity: maximum total number of reserved rows; None for no limit.
        spread: 1 groups slots strictly by class; ``math.inf`` puts all slots into one lane.

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
        self._first = (max(slots, 1), max(length, 1))  # places and room of the initial lane
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
        self._windows: list[Window] | None = None  # the open forward's
        self._open: dict[Slot, int] = {}  # number of rows that each slot fed to it

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
        """A lane with ``need`` rows per slot and a place for one more slot; None if there is none.

        Args:
            own: the seat that needs the room; in its own lane it needs no further place.
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
        # The narrowest lane first; on a tie, one that need not be widened.
        options.sort(key=lambda option: (option[0], option[0] != option[2].room))
        # Then a new lane of the class, or, if little capacity is left, of just the rows needed.
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
            for some in list(self._lanes):  # drop free places
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
        """Release memory after a slot has left a lane."""
        if self.static:
            return
        if not self._seats:
            first = self._lanes[0]
            if len(self._lanes) > 1 or (first.places, first.room) != self._first:
                self._lanes = []  # free the memory before the new lane is allocated
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
        """Open a forward, with a window per lane.

        Args:
            widths: number of rows that each slot feeds, above 0 for at least one slot.
            pad_to: minimum width of the forward. In a static cache a value above 0 requests fixed shapes.
            multiple: the number of rows of a window, over all its slots, is padded to a multiple of this.

        Raises:
            CacheFull: there is no room for the rows.
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

        Views, each [stop - start, heads, longest, size]; values after a shorter slot's rows are finite.
        """
        lane = self._lanes[0]
        longest = max(seat.length for seat in lane.seats[start:stop])
        return lane.by_layer(slice(start, stop), slice(longest))

    def rows(self, layer: int, slot: Slot) -> tuple[Tensor, Tensor]:
        """Copies of a slot's committed keys and values, each [1, heads, length, size]."""
        seat = self._seat(slot)
        at = slice(seat.place, seat.place + 1)
        keys, values = seat.lane.by_layer(at, slice(seat.length))[layer]
        return keys.clone(), values.clone()

    def read_rows(self, slot: Slot, start: int, stop: int) -> list[Tensor]:
        """Copy the rows from each buffer, [layers, heads, stop - start, size]."""
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
        """Number of committed rows."""
        return self.cache.length(self.slot)


class Window:
    """The rows of a forward over slots of one lane: slot i feeds ``widths[i]`` rows from ``offsets[i]`` on.

    Attributes:
        lane: the slots' lane.
        start, stop: range of the places that the forward covers; a slot there that feeds no rows has width 0.
            With fixed shapes ``start`` is 0 and ``stop`` a power of two, or the number of places.
        slots: the slots at these places; None for a free place.
        width: rows of the forward per slot; those beyond a slot's own width are padding.
        columns: number of cache rows that attention covers, from row 0. With fixed shapes a power of two, at
            least 1024, or the lane's room.
        span: the new rows' range, if it is the same for all slots and there is no padding.
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
                # The dimensions of advanced indices around a slice come first: [B, width, heads, size].
                target[sequences, :, places] = rows.transpose(1, 2)
        return self._views[layer]

    def written(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Indices of the rows to write: sequences [B, 1], rows [B, width]; padding goes to scratch."""
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
    """The rows that forwards of one fixed shape write and read: a ``Window`` that every step reuses.

    Args:
        window: the window of the first such forward.
        device: device of the indices of the rows to write.

    Attributes:
        rows: indices of the cache rows to write, [B, width]; set before each forward.
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
    """The smallest power of two that is at least a number."""
    return 1 << max(number - 1, 0).bit_length()
