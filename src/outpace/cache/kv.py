"""The tensor cache: keys and values of many sequences, which grows with them.

Independent of models and transformers (``targets/stock/causal.py`` adapts it).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from outpace.cache.base import Cache, CacheFull, Slot, first_room, next_slot
from outpace.cache.lanes import Lane, LayerShape, Seat, Window, buffer_layouts, power_of_two

_IDLE = 48  # rows of padding at places between those of a window that cost less than to copy what it reads


class KVCache(Cache):
    """Keys and values as tensors: a layer's rows of a forward are written in place and read as views.

    Slots are grouped in lanes by length class (powers of two from 256 rows). A forward over slots of several
    lanes runs the model once per lane, so short sequences neither reserve nor attend over as many rows as a
    long one. A lane may be up to ``spread`` times as wide as its shortest slot needs: one forward over a few
    more columns is cheaper than two (docs/decisions/5-lanes-by-length.md). A slot that outgrows this limit
    moves to another lane.

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
        capacity: maximum total number of reserved rows; None for no limit.
        spread: 1 groups slots strictly by class; ``math.inf`` puts all slots into one lane.

    Raises:
        OutpaceError: the capacity is less than ``slots * length``.
    """

    copies_rows = True
    _least_room = 256  # rows of the smallest length class

    def __init__(
        self,
        layers: Sequence[LayerShape],
        slots: int = 1,
        length: int = 256,
        capacity: int | None = None,
        spread: float = 4,
    ) -> None:
        self.layers = list(layers)
        self._first = first_room(
            slots, length, capacity, self._rows_of
        )  # places and room of the initial lane
        self.capacity = capacity
        self.spread = spread
        self._layout = buffer_layouts(self.layers)
        self._lanes = [self._new_lane(*self._first)]
        self._seats: dict[Slot, Seat] = {}
        self._windows: Sequence[Window] | None = None  # the open forward's
        self._open: dict[Slot, int] = {}  # number of rows that each slot fed to it

    # -- memory ------------------------------------------------------------------------------------------

    def _new_lane(self, places: int, room: int) -> Lane:
        return Lane(self._layout, places, room)

    def _rows_of(self, places: int, room: int) -> int:
        return places * room

    @property
    def reserved(self) -> int:
        return sum(self._rows_of(lane.places, lane.room) for lane in self._lanes)

    @property
    def row_bytes(self) -> int:
        kinds = [kind for layer in self.layers for kind in (layer.keys, layer.values)]
        return sum(kind.heads * kind.size * kind.dtype.itemsize for kind in kinds)

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for lane in self._lanes for buffer in lane.buffers)

    def cost(self, rows: int) -> int:
        return self._rows_of(1, self._room_for(rows))

    def _room_for(self, rows: int) -> int:
        room = max(self._least_room, power_of_two(rows))
        if self.capacity is not None and self._rows_of(1, room) > self.capacity:
            room = self.capacity - self._rows_of(1, 0)
        return max(room, rows)

    def _lane_for(self, need: int, own: Seat | None = None) -> Lane | None:
        """A lane with ``need`` rows per slot and a place for one more slot; None if there is none.

        Args:
            own: the seat that needs the room; in its own lane it needs no further place.
        """
        room = self._room_for(need)
        options: list[tuple[int, int, Lane]] = []
        for lane in self._lanes:
            beside = [seat.need for seat in lane.seats if seat is not own]
            wide = lane.room if need <= lane.room else room
            if wide > self.spread * self._room_for(min([need, *beside])):
                if beside or not self._narrows(lane):
                    continue
                wide = room
            options.append((wide, len(beside) + 1, lane))
        # The narrowest lane first; on a tie, one that need not be widened.
        options.sort(key=lambda option: (option[0], option[0] != option[2].room))
        # Then a new lane of the class, or, if little capacity is left, of just the rows needed.
        options += [(wide, 1, self._new_lane(0, 0)) for wide in (room, need)]
        for wide, count, lane in options:
            for places in (lane.places if count <= lane.places else max(count, 2 * lane.places), count):
                others = self.reserved - self._rows_of(lane.places, lane.room)
                needed = others + self._rows_of(places, wide) + self._peak(lane, places, wide)
                if (self.capacity is None or needed <= self.capacity) and self._resized(lane, places, wide):
                    if lane not in self._lanes:
                        self._lanes.append(lane)
                    return lane
        return None

    def _narrows(self, lane: Lane) -> bool:
        """True if a lane without slots may be made narrower for a shorter one."""
        return True

    def _peak(self, lane: Lane, places: int, room: int) -> int:
        """Number of rows to count, besides those that are reserved, while a lane is resized."""
        return 0

    def _resized(self, lane: Lane, places: int, room: int) -> bool:
        """Resize a lane; False if there is too little memory, and the lane is as before."""
        lane.resize(places, room)
        return True

    def _make_room(self, need: int, own: Seat | None = None) -> Lane:
        lane = self._lane_for(need, own)
        if lane is None:
            for some in list(self._lanes):  # drop free places
                self._shrink(some, len(some.seats))
            lane = self._lane_for(need, own)
        if lane is None:
            raise CacheFull(
                f"{need} rows for a sequence do not fit: {self.reserved} of {self.capacity} rows are reserved"
                "; wait for others to end, or make the cache with more capacity"
            )
        return lane

    def _shrink(self, lane: Lane, places: int) -> None:
        if places:
            lane.resize(places, lane.room)
        else:
            self._lanes.remove(lane)

    def _left(self, lane: Lane) -> None:
        """Release memory after a slot has left a lane."""
        if not self._seats:
            first = self._lanes[0]
            if len(self._lanes) > 1 or (first.places, first.room) != self._first:
                self._lanes = []  # free the memory before the new lane is allocated
                self._lanes = [self._new_lane(*self._first)]
        elif not lane.seats:
            self._shrink(lane, 0)
        elif lane.places > self._first[0] and len(lane.seats) * 4 <= lane.places:
            self._shrink(lane, 2 * len(lane.seats))

    # -- slots -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._seats)

    def _seat(self, slot: Slot) -> Seat:
        if slot not in self._seats:
            raise ValueError("this slot is not in use")
        return self._seats[slot]

    def allocate(self, rows: int = 0) -> Slot:
        need = rows or self._first[1]
        lane = self._make_room(need)
        slot = next_slot(self._seats)
        seat = self._seats[slot] = Seat(slot, lane, 0, need)
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

    def _reserve(self, seat: Seat, rows: int) -> None:
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

    def begin(
        self,
        widths: Mapping[Slot, int],
        multiple: int = 1,
        groups: Iterable[Collection[Slot]] | None = None,
    ) -> list[Window]:
        """Open a forward, with a window per lane, or per lane of each group.

        Args:
            widths: number of rows that each slot feeds, above 0 for at least one slot.
            multiple: the number of rows of a window, over all its slots, is padded to a multiple of this.
            groups: the slots that feed rows, by window. A window of a group skips places between its own
                where that saves much.

        Raises:
            CacheFull: there is no room for the rows.
        """
        lanes = self._fed(widths)
        windows = []
        for group in [widths] if groups is None else groups:
            seats = [self._seat(slot) for slot in group]
            for lane, fed in lanes.items():
                own = {
                    seat.place: fed[seat.place] for seat in seats if seat.lane is lane and widths[seat.slot]
                }
                if own:
                    covered = range(min(own), max(own) + 1)
                    skips = groups and (len(covered) - len(own)) * max(own.values()) > _IDLE
                    windows.append(self._window(lane, own, sorted(own) if skips else covered, multiple))
        self._windows = windows
        return windows

    def _window(self, *args: Any) -> Window:
        return Window(*args)

    def _fed(self, widths: Mapping[Slot, int]) -> dict[Lane, dict[int, int]]:
        """Make room for a forward's rows; lane -> place -> number of rows that it feeds."""
        seats = {self._seat(slot): width for slot, width in widths.items() if width}
        for seat, width in seats.items():
            self._reserve(seat, seat.length + width)
        lanes: dict[Lane, dict[int, int]] = {}
        for seat, width in seats.items():
            lanes.setdefault(seat.lane, {})[seat.place] = width
            seat.written = max(seat.written, seat.length + width)
        self._open = {seat.slot: width for seat, width in seats.items()}
        return lanes

    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        for window in self._closing(paths):
            places, sources, targets = [], [], []
            for seat, width in zip(window.seats, window.widths, strict=True):
                if seat is None or not width:
                    continue
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

    def _closing(self, paths: Mapping[Slot, Sequence[int]]) -> Sequence[Window]:
        """Check paths against the open forward, and return its windows."""
        if self._windows is None:
            raise RuntimeError("keep without a forward: call begin first")
        for slot, path in paths.items():
            if len(path) and not max(path) < self._open.get(slot, 0):
                raise ValueError(f"{slot} fed {self._open.get(slot, 0)} rows, so it cannot keep {list(path)}")
        return self._windows

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
