"""The cache of an encoder-decoder model: the decoder's rows, and keys and values of each slot's source."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers import Cache as ModelCache

from outpace.cache import KVCache, LayerShape, Slot


class Seq2SeqCache(KVCache):
    """The decoder's rows, and for each slot the keys and values of its source.

    ``sources`` is a separate cache, whose slots are allocated and freed together with these; its rows are
    cross-attention keys and values. Both have all slots in one lane, so that a slot has the same place in
    both. ``capacity`` counts the decoder's rows.

    Args:
        layers: shape of each decoder layer's rows.
        cross: shape of each decoder layer's rows of cross-attention.
    """

    # Rows depend on the source too, so those of another sequence with the same tokens may differ.
    copies_rows = False

    def __init__(
        self,
        layers: list[LayerShape],
        cross: list[LayerShape],
        slots: int,
        length: int,
        capacity: int | None = None,
    ) -> None:
        super().__init__(layers, slots, length, capacity=capacity, spread=math.inf)
        self.sources = KVCache(cross, slots, spread=math.inf)
        self.beside: dict[Slot, Slot] = {}

    @property
    def bytes(self) -> int:
        return super().bytes + self.sources.bytes

    def allocate(self, rows: int = 0) -> Slot:
        slot = super().allocate(rows)
        self.beside[slot] = self.sources.allocate(1)
        return slot

    def free(self, slot: Slot) -> None:
        super().free(slot)
        self.sources.free(self.beside.pop(slot))


class CrossRows(ModelCache):
    """Views of cross-attention keys and values as a filled transformers cache."""

    class Seq2SeqLayer:
        def __init__(self, keys: Tensor, values: Tensor) -> None:
            self.keys, self.values = keys, values

    def __init__(self, views: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(layers=[])
        self.layers: list[Any] = [CrossRows.Seq2SeqLayer(keys, values) for keys, values in views]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.layers[layer_idx].keys.shape[2])
