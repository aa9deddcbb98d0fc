"""Cache of the keys and values of a drafter's own layers: a slot per sequence, one forward for all."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import KVCache, LayerShape, RowShape, Slot
from outpace.learned.layers import LayerConfig, Store
from outpace.transfer import gather, scatter, upload
from outpace.tree import chain_mask

__all__ = ["Feed", "Forward", "LayerCache", "Slot"]


@dataclass(frozen=True)
class Feed:
    """Input of one sequence to a forward: w rows after its cached ones.

    Attributes:
        positions: position of each row, [w].
        sees: the mask over the last k rows, those fed now included, [w, k]; all attend to the rows before.
    """

    slot: Slot
    positions: Seq[int]
    sees: NDArray[np.bool_]

    @classmethod
    def text(cls, slot: Slot, first: int, width: int) -> Feed:
        """Rows of a text, from position ``first`` on, with causal attention."""
        return cls(slot, range(first, first + width), chain_mask(width))


class Forward:
    """A forward over S slots, open until ``keep``.

    Attributes:
        window: the rows of the cache that it writes.
        positions: positions of each slot's rows, [S, width].
        mask: true where a row attends to a column, [S, 1, width, columns].
    """

    def __init__(self, cache: KVCache, feeds: Seq[Feed], device: torch.device) -> None:
        self._cache = cache
        self._feeds = feeds
        (window,) = cache.begin({feed.slot: len(feed.positions) for feed in feeds})
        self.window = window
        places = {slot: place for place, slot in enumerate(window.slots)}
        self._order = [places[feed.slot] for feed in feeds]
        count = len(window.slots)
        positions = np.zeros((count, window.width), dtype=np.int64)
        mask = np.zeros((count, 1, window.width, window.columns), dtype=np.bool_)
        # Padding attends to an arbitrary row, so that its softmax is defined.
        mask[:, :, :, 0] = True
        for place, feed in zip(self._order, feeds, strict=True):
            width, own = feed.sees.shape
            end = window.offsets[place] + width
            positions[place, :width] = feed.positions
            mask[place, 0, :width, : end - own] = True
            mask[place, 0, :width, end - own : end] = feed.sees
        self.positions = upload(positions, device)
        self.mask = upload(mask, device)

    def store(self, layer: int) -> Store:
        """The function that stores a layer's new keys and values."""
        return lambda keys, values: self.window.append(layer, keys, values)

    def pad(self, inputs: Seq[Tensor]) -> Tensor:
        """Pad the rows of each feed, [w, ...], with zeros to one tensor [S, width, ...]."""
        size = (len(self.window.slots), self.window.width, *inputs[0].shape[1:])
        padded = inputs[0].new_zeros(size)
        for place, rows in zip(self._order, inputs, strict=True):
            padded[place, : len(rows)] = rows
        return padded

    def spread(self, rows: Tensor) -> Tensor:
        """One row of each feed, [feeds, ...], as one tensor [S, 1, ...]; zeros where none is fed."""
        if self._order == list(range(len(self.window.slots))):
            return rows[:, None]
        spread = rows.new_zeros((len(self.window.slots), *rows.shape[1:]))
        scatter(spread, self._order, rows)
        return spread[:, None]

    def gathered(self, states: Tensor) -> Tensor:
        """The first row of each feed, [feeds, ...], from [S, width, ...]."""
        return gather(states[:, 0], self._order)

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
    """

    def __init__(self, layers: Seq[LayerShape]) -> None:
        self._layers = layers
        self._device = layers[0].keys.device
        # One lane, so that a module runs once: padding its few layers costs little compared with the target.
        self._cache = KVCache(layers, spread=math.inf)

    @classmethod
    def of(cls, config: LayerConfig, layers: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """A cache for this many layers of ``outpace.learned``."""
        rows = RowShape(config.kv_heads, config.head_size, dtype, device)
        return cls([LayerShape(rows, rows)] * layers)

    def renewed(self) -> LayerCache:
        """An empty cache of the same shape."""
        return LayerCache(self._layers)

    def open(self) -> Slot:
        """Allocate an empty slot."""
        return self._cache.allocate()

    def close(self, slot: Slot) -> None:
        self._cache.free(slot)

    def length(self, slot: Slot) -> int:
        return self._cache.length(slot)

    def truncate(self, slot: Slot, length: int) -> None:
        """Remove a slot's rows from ``length`` on."""
        if self.length(slot) > length:
            self._cache.truncate(slot, length)

    def begin(self, feeds: Seq[Feed]) -> Forward:
        """Open a forward for feeds of at least one row each."""
        return Forward(self._cache, feeds, self._device)
