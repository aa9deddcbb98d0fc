"""Cache of the keys and values of a drafter's own layers: a slot per sequence, one forward for all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import FixedCache, FixedRows, FixedWindow, KVCache, LayerShape, RowShape, Slot, Window
from outpace.cache.lanes import power_of_two
from outpace.learned.layers import LayerConfig, Store
from outpace.targets.gpu.fixed import FixedShapes
from outpace.transfer import upload
from outpace.tree import chain_mask

__all__ = ["Feeding", "Forward", "LayerCache", "LayerFeed", "Slot"]


@dataclass(frozen=True)
class LayerFeed:
    """Input of one sequence to a forward: w rows after its cached ones.

    Attributes:
        positions: position of each row, [w].
        sees: the mask over the last k rows, those fed now included, [w, k]; all attend to the rows before.
    """

    slot: Slot
    positions: Seq[int]
    sees: NDArray[np.bool_]

    @classmethod
    def text(cls, slot: Slot, first: int, width: int) -> LayerFeed:
        """Rows of a text, from position ``first`` on, with causal attention."""
        return cls(slot, range(first, first + width), chain_mask(width))


@dataclass
class Forward:
    """A forward over S slots, as a module's layers see it.

    Attributes:
        window: the rows of the cache that it writes.
        positions: positions of each slot's rows, [S, width].
        mask: true where a row attends to a column, [S, 1, width, columns].
        widths: number of rows that each slot feeds, [S].
    """

    window: Window | FixedRows
    positions: Tensor
    mask: Tensor
    widths: Tensor

    def store(self, layer: int) -> Store:
        """The function that stores a layer's new keys and values."""
        return lambda keys, values: self.window.append(layer, keys, values)


class Feeding(Forward):
    """A forward of feeds, open until ``keep``."""

    def __init__(self, cache: KVCache, feeds: Seq[LayerFeed], device: torch.device) -> None:
        self._cache = cache
        self._feeds = feeds
        (window,) = cache.begin({feed.slot: len(feed.positions) for feed in feeds})
        places = {slot: place for place, slot in enumerate(window.slots)}
        self._widths = window.widths
        self._order = [places[feed.slot] for feed in feeds]
        self._size = size = len(window.slots), window.width
        positions = np.zeros(size, dtype=np.int64)
        mask = np.zeros((size[0], 1, size[1], window.columns), dtype=np.bool_)
        # Padding attends to an arbitrary row, so that its softmax is defined.
        mask[:, :, :, 0] = True
        for place, feed in zip(self._order, feeds, strict=True):
            width, own = feed.sees.shape
            end = window.offsets[place] + width
            positions[place, :width] = feed.positions
            mask[place, 0, :width, : end - own] = True
            mask[place, 0, :width, end - own : end] = feed.sees
        self.window, self.positions, self.mask = window, upload(positions, device), upload(mask, device)

    @property
    def widths(self) -> Tensor:  # type: ignore[override]
        return upload(self._widths, self.positions.device)

    def pad(self, inputs: Seq[Tensor]) -> Tensor:
        """Pad the rows of each feed, [w, ...], with zeros to one tensor [S, width, ...]."""
        padded = inputs[0].new_zeros(*self._size, *inputs[0].shape[1:])
        for place, rows in zip(self._order, inputs, strict=True):
            padded[place, : len(rows)] = rows
        return padded

    def rows(self, states: Tensor) -> list[Tensor]:
        """Extract the rows of each feed, [w, ...], from [S, width, ...]."""
        return [
            states[place, : len(feed.positions)] for place, feed in zip(self._order, self._feeds, strict=True)
        ]

    def keep(self, counts: Seq[int]) -> None:
        """Close the forward: keep the first rows of each feed and undo the others."""
        self._cache.keep({feed.slot: range(count) for feed, count in zip(self._feeds, counts, strict=True)})


class LayerCache:
    """Keys and values of a module's layers for many sequences.

    Args:
        layers: shape of each layer's rows, all on one device.
        shapes: captures forwards of fixed shapes; None if there are none.
    """

    def __init__(self, layers: Seq[LayerShape], shapes: FixedShapes | None = None) -> None:
        self._layers = layers
        self.device = layers[0].keys.device
        self.shapes = shapes
        # One lane, so that a module runs once: padding its few layers costs little compared with the target.
        self._cache = (KVCache if shapes is None else FixedCache)(layers, spread=math.inf)

    @classmethod
    def of(cls, config: LayerConfig, layers: int, like: Tensor, shapes: FixedShapes | None) -> LayerCache:
        """A cache for this many layers of ``outpace.learned``, in the dtype of ``like`` and on its device."""
        rows = RowShape(config.kv_heads, config.head_size, like.dtype, like.device)
        return cls([LayerShape(rows, rows)] * layers, shapes)

    def renewed(self) -> LayerCache:
        return LayerCache(self._layers, self.shapes)

    def warm(self, slots: int) -> None:
        """Make room for this number of slots; memory that is kept is moved later only for longer texts."""
        for slot in [self.open() for _ in range(slots if self.shapes is not None else 0)]:
            self.close(slot)

    def open(self) -> Slot:
        return self._cache.allocate()

    def close(self, slot: Slot) -> None:
        self._cache.free(slot)

    def length(self, slot: Slot) -> int:
        return self._cache.length(slot)

    def truncate(self, slot: Slot, length: int) -> None:
        """Remove a slot's rows from ``length`` on."""
        if self.length(slot) > length:
            self._cache.truncate(slot, length)

    def begin(self, feeds: Seq[LayerFeed]) -> Feeding:
        """Open a forward for feeds of at least one row each."""
        return Feeding(self._cache, feeds, self.device)

    @contextmanager
    def fixed(self, widths: Mapping[Slot, int], kept: bool) -> Iterator[FixedWindow]:
        """Context of a forward of fixed shapes of these numbers of rows.

        Args:
            kept: whether the rows stay in the cache.
        """
        assert isinstance(self._cache, FixedCache)
        (window,) = self._cache.begin_fixed(widths, power_of_two(max(widths.values())))
        yield window
        self._cache.keep({slot: range(width) for slot, width in widths.items()} if kept else {})
