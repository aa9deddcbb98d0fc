"""Keys and values of many sequences, in preallocated slots, with one undo verb: ``keep``.

Rows of all layers that have one shape, dtype and device share one buffer, so that compacting accepted rows
is one copy, not one per layer. Knows neither a model nor transformers; ``targets/causal.py`` adapts it.

Rows that are not finite. Attention multiplies a masked row's value by 0, and 0 x NaN is NaN, so a row that
a mask hides must still be finite. Buffers begin as zeros, padded rows go to a scratch row outside every view,
and rows given back (``free``, ``truncate``) are zeroed: what one sequence computed never reaches another.
Rows that ``keep`` rejects stay until they are written over. If such a row is not finite, then all rows of its
sequence were NaN in the very forward that wrote it, for they share a view. (So in half precision a draft
that overflows can spoil its sequence, where plain decoding would not have met it.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core import OutpaceError


@dataclass(frozen=True)
class RowShape:
    """What one kind of row (the keys or the values of a layer) looks like: [heads, size]."""

    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of a layer may differ in shape (latent attention)."""

    keys: RowShape
    values: RowShape


class Slot:
    """A sequence's place in a cache. The cache moves slots to keep those in use in front."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class KVCache:
    """Slots 0..B-1 are in use; slot b holds ``lengths[b]`` committed rows.

    A forward is opened by ``begin(widths, first)``: sequence ``first + i`` feeds ``widths[i]`` rows, which
    ``append`` writes behind its committed rows, layer by layer, padded rows going to a scratch row that
    nothing reads. ``keep`` closes it: of the rows just fed only a path stays.

    Args:
        layers: shape of each layer's rows.
        slots: sequences to make room for.
        length: rows to make room for in each slot, those of a draft included. Both grow by doubling, unless
            static.
        static: fixed shapes, for compiled steps and CUDA graphs: a forward covers every slot and every row,
            whatever is in use, and outgrowing the cache is an error.

    Raises:
        OutpaceError: a static cache has no room left.
    """

    def __init__(
        self, layers: Sequence[LayerShape], slots: int = 1, length: int = 256, static: bool = False
    ) -> None:
        self.layers = list(layers)
        self.static = static
        self.lengths: list[int] = []
        self._slots: list[Slot] = []
        self._groups: dict[RowShape, list[tuple[int, int]]] = {}
        for layer, shape in enumerate(self.layers):
            self._groups.setdefault(shape.keys, []).append((layer, 0))
            self._groups.setdefault(shape.values, []).append((layer, 1))
        self._capacity = (max(slots, 1), max(length, 1))
        self._buffers = {shape: self._zeros(shape, *self._capacity) for shape in self._groups}
        self._written = [0] * self.slots  # rows from here on are zero
        self._window: Window | None = None
        self._targets: list[tuple[Tensor, Tensor]] = []
        self._views: list[tuple[Tensor, Tensor]] = []

    def _zeros(self, shape: RowShape, slots: int, length: int) -> Tensor:
        # Outside inference mode, so that it can be written under either grad mode. The last row is scratch.
        with torch.inference_mode(False):
            size = (len(self._groups[shape]), slots, shape.heads, length + 1, shape.size)
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def _by_layer(self, *where: slice) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, a part of its [slots, heads, length + 1, size]: views."""
        views: dict[tuple[int, int], Tensor] = {}
        for shape, members in self._groups.items():
            # One slice and one unbind for all layers: a slice for each would cost more than the write.
            views.update(zip(members, self._buffers[shape][(slice(None), *where)].unbind(), strict=True))
        return [(views[layer, 0], views[layer, 1]) for layer in range(len(self.layers))]

    @property
    def slots(self) -> int:
        return self._capacity[0]

    @property
    def length(self) -> int:
        """Rows a slot has room for."""
        return self._capacity[1]

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._slots)

    def slot(self, index: int) -> Slot:
        """The slot in use at an index."""
        return self._slots[index]

    def allocate(self) -> Slot:
        """Take the next slot into use, empty."""
        slot = Slot(len(self._slots))
        if slot.index >= self.slots:
            self._grow(slots=slot.index + 1)
        self._slots.append(slot)
        self.lengths.append(0)
        return slot

    def free(self, slot: Slot) -> None:
        """Give a slot back; the last one in use moves into the gap."""
        if not (slot.index < len(self) and self._slots[slot.index] is slot):
            raise ValueError("this slot is not in use")
        last = self._slots.pop()
        length = self.lengths.pop()
        if last is not slot:
            for buffer in self._buffers.values():
                buffer[:, slot.index, :, :length] = buffer[:, last.index, :, :length]
            self._clear(slot.index, length)
            self._written[slot.index] = length
            self._slots[slot.index] = last
            self.lengths[slot.index] = length
            last.index, slot.index = slot.index, last.index
        self._clear(slot.index, 0)

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        """Forget a slot's rows from ``length`` on, save those of a path, which move up in its order.

        Args:
            path: rows to keep, counted from row ``length``, in ascending order.
        """
        most = self.lengths[slot.index]
        if not 0 <= length <= most or any(not 0 <= row < most - length for row in path):
            raise ValueError(f"cannot keep {length} rows and {list(path)} after them of {most} rows")
        moved = [(length + row, length + place) for place, row in enumerate(path) if row != place]
        if moved:
            sources, targets = zip(*moved, strict=True)
            self._move([slot.index] * len(moved), list(sources), list(targets))
        self.lengths[slot.index] = length + len(path)
        self._clear(slot.index, length + len(path))

    @contextmanager
    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> Iterator[None]:
        """Commit rows that are given up at the end: a draft that is made behind the committed rows.

        No slot may be taken or given back meanwhile. Rows given up are zeroed, unless ``ahead`` is given.

        Args:
            ahead: slot -> rows behind its committed ones that are there already, and count from the start.
                At the end rows then stay where they are, until they are written over.
        """
        lengths = list(self.lengths)
        for slot, rows in (ahead or {}).items():
            self.lengths[slot.index] += rows
        try:
            yield
        finally:
            used, self.lengths = self.lengths, lengths
            if ahead is None:
                for index, (most, length) in enumerate(zip(used, lengths, strict=True)):
                    if most > length:
                        self._clear(index, length)

    def _clear(self, index: int, start: int) -> None:
        """Zero what was written to a slot from row ``start`` on."""
        end = self._written[index]
        if end > start:
            for buffer in self._buffers.values():
                buffer[:, index, :, start:end] = 0
            self._written[index] = start

    def _grow(self, slots: int = 0, length: int = 0) -> None:
        if self.static:
            raise OutpaceError(
                f"the static cache holds {self.slots} sequences of {self.length} rows; "
                f"make it with slots >= {slots or self.slots} and length >= {length or self.length}"
            )
        wanted = tuple(
            old if new <= old else max(new, 2 * old)
            for new, old in zip((slots, length), self._capacity, strict=True)
        )
        used, longest = len(self.lengths), max(self.lengths, default=0)
        grown = {}
        for shape, old in self._buffers.items():
            grown[shape] = self._zeros(shape, *wanted)
            grown[shape][:, :used, :, :longest] = old[:, :used, :, :longest]
        self._buffers, self._capacity = grown, (wanted[0], wanted[1])
        self._targets, self._views = [], []  # they would keep the old buffers alive
        written = [min(rows, longest) for rows in self._written[:used]]
        self._written = written + [0] * (self.slots - used)

    def begin(self, widths: Sequence[int], first: int = 0, pad_to: int = 0) -> Window:
        """Open a forward over slots first .. first + len(widths) - 1; a static cache adds all the others.

        Args:
            widths: rows that each sequence feeds.
            pad_to: least width of the forward.
        """
        offsets = self.lengths[first : first + len(widths)]
        if len(offsets) != len(widths):
            raise ValueError(
                f"{len(widths)} sequences from slot {first} on, but {len(self)} slots are in use"
            )
        ends = [offset + width for offset, width in zip(offsets, widths, strict=True)]
        longest = max(ends)
        if longest > self.length:
            self._grow(length=longest)
        for slot, end in enumerate(ends, first):
            self._written[slot] = max(self._written[slot], end)
        window = Window(first, list(widths), offsets, max(*widths, pad_to), longest, self.length)
        if self.static:
            window.cover(self.slots, self.lengths)
        self._window = window
        covered = slice(window.start, window.stop)
        self._targets = self._by_layer(covered, slice(None), window.span or slice(None))
        self._views = self._by_layer(covered, slice(None), slice(window.columns))
        return window

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows, each [B, heads, width, size]; returns views [B, heads, columns, size]."""
        window = self._window
        if window is None:
            raise RuntimeError("append outside a forward: call begin first")
        for target, rows in zip(self._targets[layer], (keys, values), strict=True):
            if window.span is not None:
                target.copy_(rows)
            else:
                sequences, places = window.places(target.device)
                # Advanced indices around a slice go first: [B, width, heads, size].
                target[sequences, :, places] = rows.transpose(1, 2)
        return self._views[layer]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Close the forward: of the rows each sequence fed (0 .. width - 1) commit its path's, in order.

        The first row of a path is normally 0, the root; an empty path undoes the whole feed.
        """
        window = self._window
        if window is None:
            raise RuntimeError("keep without a forward: call begin first")
        slots, sources, targets = [], [], []
        for slot, path in enumerate(paths, window.first):
            offset = self.lengths[slot]
            for row, source in enumerate(path):
                if row != source:
                    slots.append(slot)
                    sources.append(offset + source)
                    targets.append(offset + row)
        if slots:
            self._move(slots, sources, targets)
        for slot, path in enumerate(paths, window.first):
            self.lengths[slot] += len(path)
        self._window = None

    def _move(self, slots: list[int], sources: list[int], targets: list[int]) -> None:
        """Copy rows within their slots. All are read before any is written."""
        devices = {shape.device for shape in self._buffers}
        indices = {device: torch.tensor([slots, sources, targets], device=device) for device in devices}
        for shape, buffer in self._buffers.items():
            slot, source, target = indices[shape.device].unbind()
            buffer[:, slot, :, target] = buffer[:, slot, :, source]

    def views(self, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Committed keys and values of each layer, of slots first .. first + count - 1, as views.

        Each is [count, heads, longest, size]; what lies behind a shorter slot's rows is finite.
        """
        longest = max(self.lengths[first : first + count])
        return self._by_layer(slice(first, first + count), slice(None), slice(longest))

    def rows(self, layer: int, slot: Slot) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one slot, copies, each [1, heads, length, size]."""
        at = slice(slot.index, slot.index + 1)
        keys, values = self._by_layer(at, slice(None), slice(self.lengths[slot.index]))[layer]
        return keys.clone(), values.clone()


class Place(NamedTuple):
    """Where a sequence's rows are."""

    cache: KVCache
    slot: Slot

    @property
    def rows(self) -> int:
        """Committed rows."""
        return self.cache.lengths[self.slot.index]


class Window:
    """The rows of one forward: sequence i of it feeds rows offsets[i] .. offsets[i] + widths[i] - 1.

    Attributes:
        first: slot of the first sequence that feeds rows.
        start, stop: slots that the forward covers; those that feed nothing have width 0.
        width: rows of the forward, for each slot; those past a sequence's own are padding.
        columns: rows of the cache that its attention sees, from 0 on.
        span: where the new rows lie, if that is the same for all and there is no padding.
    """

    def __init__(
        self, first: int, widths: list[int], offsets: list[int], width: int, columns: int, scratch: int
    ) -> None:
        self.first = self.start = first
        self.stop = first + len(widths)
        self.widths = widths
        self.offsets = offsets
        self.width = width
        self.columns = columns
        self._scratch = scratch
        even = all(o == offsets[0] for o in offsets) and all(w == width for w in widths)
        self.span = slice(offsets[0], offsets[0] + width) if even else None
        self._places: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def cover(self, slots: int, lengths: list[int]) -> None:
        """Widen to every slot and every row, so that shapes depend on nothing but ``width``."""
        after = slots - self.stop
        self.widths = [0] * self.start + self.widths + [0] * after
        self.offsets = lengths + [0] * (slots - len(lengths))
        self.start, self.stop = 0, slots
        self.columns = self._scratch
        self.span = None

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Indices of the rows to write: sequences [B, 1] and rows [B, width]; padding goes to scratch."""
        if device not in self._places:
            rows = [
                [*range(offset, offset + width), *[self._scratch] * (self.width - width)]
                for offset, width in zip(self.offsets, self.widths, strict=True)
            ]
            sequences = torch.arange(len(rows), device=device)[:, None]
            self._places[device] = (sequences, torch.tensor(rows, device=device))
        return self._places[device]
