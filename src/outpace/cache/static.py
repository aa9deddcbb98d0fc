"""The tensor caches of fixed shapes: windows of few sizes, over buffers that seldom or never move."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outpace.cache.base import CacheFull, Slot
from outpace.cache.kv import KVCache
from outpace.cache.lanes import Lane, LaneMemory, LayerShape, Seat, Window, power_of_two
from outpace.core import out_of_memory

_LEAST_COLUMNS = 1024  # minimum columns of a forward of fixed shapes, if the lane has that many: fewer shapes


class FixedCache(KVCache):
    """A cache that grows as ``KVCache`` does, but keeps its memory: what was captured over it stays of use.

    A lane's memory is released only if others need its rows. While a lane is widened, memory contains the
    new rows and the old ones of a buffer; the capacity counts both. If memory runs out nevertheless, the rows
    do not fit.
    """

    fixed = True
    _least_room = _LEAST_COLUMNS

    @property
    def usual_rows(self) -> int:
        """Rows of a slot of a usual request: those that its first lane has, but at least the least room."""
        return self.max_length or self._room_for(self._first[1])

    def begin_fixed(self, widths: Mapping[Slot, int], least: int) -> list[FixedWindow]:
        """Open a forward of fixed shapes, with a window per lane.

        Args:
            widths: number of rows that each slot feeds, above 0 for at least one slot.
            least: minimum width of the forward.

        Raises:
            CacheFull: there is no room for the rows.
        """
        windows = [FixedWindow(lane, places, least) for lane, places in self._fed(widths).items()]
        self._windows = windows
        return windows

    def __del__(self) -> None:
        for lane in vars(self).get("_lanes", ()):  # they and their seats hold each other
            lane.memory = LaneMemory()

    def _left(self, lane: Lane) -> None:
        """Keep the memory."""

    def _narrows(self, lane: Lane) -> bool:
        return False

    def _peak(self, lane: Lane, places: int, room: int) -> int:
        if (places, room) == (lane.places, lane.room):
            return 0
        old = self._rows_of(lane.places, lane.room)
        largest = max((buffer.nbytes for buffer in lane.buffers), default=0)
        return -(-old * largest // max(sum(buffer.nbytes for buffer in lane.buffers), 1))

    def _resized(self, lane: Lane, places: int, room: int) -> bool:
        try:
            return super()._resized(lane, places, room)
        except Exception as error:
            if not out_of_memory(error):
                raise
            return False


class StaticCache(FixedCache):
    """Keys and values in one lane that never moves, for forwards of fixed shapes; outgrowing it is an error.

    Args:
        layers: shape of each layer's rows.
        slots: maximum number of slots.
        length: maximum number of rows per slot, including those of a draft.
        capacity: maximum total number of rows.

    Raises:
        OutpaceError: the capacity is less than ``slots * length``.
    """

    static = True

    def __init__(
        self, layers: Sequence[LayerShape], slots: int = 1, length: int = 256, capacity: int | None = None
    ) -> None:
        super().__init__(layers, slots, length, capacity)
        self.max_slots, self.max_length = self._first

    def cost(self, rows: int) -> int:
        return self._first[1]

    def _make_room(self, need: int, own: Seat | None = None) -> Lane:
        (lane,) = self._lanes
        if need > lane.room or (own is None and len(lane.seats) == lane.places):
            raise CacheFull(
                f"the static cache holds {self.max_slots} sequences of {self.max_length} rows; make it with "
                f"slots >= {len(self) + (own is None)} and length >= {max(need, self._first[1])}"
            )
        return lane


class FixedWindow(Window):
    """A window of which there are few sizes: it covers places and columns by powers of two.

    Attributes:
        start, stop: 0, and a power of two or the number of places.
        columns: a power of two, at least 1024, or the lane's room.
        span: None.
    """

    def __init__(self, lane: Lane, widths: Mapping[int, int], least: int) -> None:
        covered = range(min(power_of_two(max(widths) + 1), lane.places))
        super().__init__(lane, widths, covered, least=least)
        self.columns = min(max(power_of_two(self.columns), _LEAST_COLUMNS), lane.room)
        self.span = None


class FixedRows:
    """The rows that forwards of one fixed shape write and read: a window that every step reuses.

    Args:
        window: the window of the first such forward.
        device: device of the indices of the rows to write.

    Attributes:
        rows: indices of the cache rows to write, [B, width]; set before each forward.
    """

    def __init__(self, window: FixedWindow, device: torch.device) -> None:
        self.width, self.columns, self.scratch = window.width, window.columns, window.lane.room
        self.sequences = torch.arange(window.stop, device=device)[:, None]
        self.rows = self.sequences  # until a forward sets it
        places = slice(window.start, window.stop)
        self._targets = window.lane.by_layer(places, slice(None))
        self._views = window.lane.by_layer(places, slice(window.columns))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows, each [B, heads, width, size]; returns views [B, heads, columns, size]."""
        for target, new in zip(self._targets[layer], (keys, values), strict=True):
            sequences, rows = self.sequences.to(target.device), self.rows.to(target.device)
            target[sequences, :, rows] = new.transpose(1, 2)
        return self._views[layer]

    def at(self, rows: Tensor) -> FixedRows:
        """The same, for a part of a forward's rows, with these indices, [B, width]."""
        part = copy.copy(self)
        part.rows, part.width = rows, rows.shape[1]
        return part
