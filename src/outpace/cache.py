"""Keys and values of many sequences, in preallocated slots, with one undo verb: ``keep``.

Rows of all layers that have one shape, dtype and device share one buffer, so that compacting accepted rows
is one copy, not one per layer. Knows neither a model nor transformers; ``targets/causal.py`` adapts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
        length: rows to make room for in each slot. Both grow by doubling, unless static.
        static: fixed shapes, for compiled steps and CUDA graphs: ``append`` returns every row of every
            slot, whatever is in use, and outgrowing the cache is an error.

    Raises:
        MemoryError: a static cache has no room left.
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
        self._index()
        self._window: Window | None = None

    def _zeros(self, shape: RowShape, slots: int, length: int) -> Tensor:
        # Zeroed, not empty: a masked row still meets its value as 0 x value, and 0 x NaN is NaN. Outside
        # inference mode, so that it can be written under either grad mode. The last row is scratch.
        with torch.inference_mode(False):
            size = (len(self._groups[shape]), slots, shape.heads, length + 1, shape.size)
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def _index(self) -> None:
        """Views of the buffers by layer: keys and values, each [slots, heads, length + 1, size]."""
        views: list[list[Tensor | None]] = [[None, None] for _ in self.layers]
        for shape, members in self._groups.items():
            for place, (layer, which) in enumerate(members):
                views[layer][which] = self._buffers[shape][place]
        self._rows = views

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
        last = self._slots.pop()
        length = self.lengths.pop()
        if last is slot:
            return
        for buffer in self._buffers.values():
            buffer[:, slot.index, :, :length] = buffer[:, last.index, :, :length]
        self._slots[slot.index] = last
        self.lengths[slot.index] = length
        last.index = slot.index

    def truncate(self, slot: Slot, length: int) -> None:
        """Forget a slot's rows from ``length`` on."""
        if not 0 <= length <= self.lengths[slot.index]:
            raise ValueError(f"cannot keep {length} of {self.lengths[slot.index]} rows")
        self.lengths[slot.index] = length

    def _grow(self, slots: int = 0, length: int = 0) -> None:
        if self.static:
            raise MemoryError(
                f"the static cache holds {self.slots} sequences of {self.length} rows; "
                f"make it with slots >= {slots or self.slots} and length >= {length or self.length}"
            )
        old_slots, old_length = self._capacity
        wanted_slots = max(old_slots, slots if slots <= old_slots else max(slots, 2 * old_slots))
        wanted_length = max(old_length, length if length <= old_length else max(length, 2 * old_length))
        for shape, old in self._buffers.items():
            new = self._zeros(shape, wanted_slots, wanted_length)
            new[:, :old_slots, :, :old_length] = old[:, :, :, :old_length]
            self._buffers[shape] = new
        self._capacity = (wanted_slots, wanted_length)
        self._index()

    def begin(self, widths: Sequence[int], first: int = 0, pad_to: int = 0) -> Window:
        """Open a forward over slots first .. first + len(widths) - 1.

        Returns the window: how many rows each sequence feeds, at what offset, and how many columns the
        attention sees.
        """
        offsets = self.lengths[first : first + len(widths)]
        if len(offsets) != len(widths):
            raise ValueError(
                f"{len(widths)} sequences from slot {first} on, but {len(self)} slots are in use"
            )
        longest = max(offset + width for offset, width in zip(offsets, widths, strict=True))
        if longest > self.length:
            self._grow(length=longest)
        columns = self.length if self.static else longest
        self._window = Window(first, list(widths), offsets, max(*widths, pad_to), columns, self.length)
        return self._window

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows, each [B, heads, width, size]; returns views [B, heads, columns, size]."""
        window = self._window
        if window is None:
            raise RuntimeError("append outside a forward: call begin first")
        found = []
        for which, rows in enumerate((keys, values)):
            store = self._rows[layer][which]
            assert store is not None
            view = store[window.first : window.last]
            if window.span is not None:
                view[:, :, window.span] = rows
            else:
                sequences, places = window.places(store.device)
                # Advanced indices around a slice go first: [B, width, heads, size].
                view[sequences, :, places] = rows.transpose(1, 2)
            found.append(view[:, :, : window.columns])
        return found[0], found[1]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Close the forward: of the rows each sequence fed (0 .. width - 1) commit those of its path, in order.

        The first row of a path is normally 0, the root; an empty path undoes the whole feed.
        """
        window = self._window
        if window is None:
            raise RuntimeError("keep without a forward: call begin first")
        slots, sources, targets = [], [], []
        for place, (path, offset) in enumerate(zip(paths, window.offsets, strict=True)):
            for row, source in enumerate(path):
                if row != source:
                    slots.append(window.first + place)
                    sources.append(offset + source)
                    targets.append(offset + row)
            self.lengths[window.first + place] = offset + len(path)
        if slots:
            self._move(slots, sources, targets)
        self._window = None

    def _move(self, slots: list[int], sources: list[int], targets: list[int]) -> None:
        for shape, buffer in self._buffers.items():
            slot, source, target = torch.tensor([slots, sources, targets], device=shape.device)
            buffer[:, slot, :, target] = buffer[:, slot, :, source]

    def rows(self, layer: int, slot: Slot) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one slot, copies, each [1, heads, length, size]."""
        keys, values = self._rows[layer]
        assert keys is not None and values is not None
        at, length = slot.index, self.lengths[slot.index]
        return keys[at : at + 1, :, :length].clone(), values[at : at + 1, :, :length].clone()


class Window:
    """The rows of one forward: sequence i feeds rows offsets[i] .. offsets[i] + widths[i] - 1."""

    def __init__(
        self, first: int, widths: list[int], offsets: list[int], width: int, columns: int, scratch: int
    ) -> None:
        self.first = first
        self.last = first + len(widths)
        self.widths = widths
        self.offsets = offsets
        self.width = width
        self.columns = columns
        self._scratch = scratch
        even = len(set(offsets)) == 1 and all(w == width for w in widths)
        self.span = slice(offsets[0], offsets[0] + width) if even else None
        self._places: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Indices of the rows to write: sequences [B, 1] and rows [B, width]; padding goes to scratch."""
        if device not in self._places:
            rows = [
                list(range(offset, offset + width)) + [self._scratch] * (self.width - width)
                for offset, width in zip(self.offsets, self.widths, strict=True)
            ]
            sequences = torch.arange(len(rows), device=device)[:, None]
            self._places[device] = (sequences, torch.tensor(rows, device=device))
        return self._places[device]
