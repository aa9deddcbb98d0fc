"""A rounded head of fewer tokens: the first of a vocabulary, and those that texts have besides."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from outpace.native import memory
from outpace.native.forward import ProductStruct
from outpace.targets.cpu.layouts import Blocks
from outpace.targets.native.weights import Product

_MORE = 256  # panels of other tokens, at most


class FewOutputs:
    """The first outputs of a rounded product, and panels of others, the oldest of which are replaced.

    Args:
        product: whose packed weights are ``Blocks``.
        first: number of its first outputs that stay.

    Attributes:
        ids: the product's output of each of these.
    """

    @torch.inference_mode()
    def __init__(self, product: Product, first: int) -> None:
        assert isinstance(product.packed, Blocks)
        self._whole, self._bias = product.packed, product.bias
        size = self._whole.panel
        self._first, self._last = first // size, self._whole.outputs // size  # the last may not be whole
        room = min(self._first + _MORE, self._last)
        weights = self._whole.weights[:room]
        self._weights = memory.zeros(*weights.shape, dtype=weights.dtype).copy_(weights)
        self._ids = torch.arange(room * size)
        self._own_bias = None if self._bias is None else self._bias[: room * size].clone()
        self._places: dict[int, int] = {}  # number of a panel -> its place, in the order of coming

    @property
    def _panels(self) -> int:
        return self._first + len(self._places)

    @property
    def ids(self) -> Tensor:
        return self._ids[: self._panels * self._whole.panel]

    def has(self, output: int) -> bool:
        panel = output // self._whole.panel
        return panel < self._first or panel in self._places

    def add(self, outputs: Iterable[int]) -> bool:
        """Add the panels of these outputs; True if any was missing."""
        size, missing = self._whole.panel, False
        for panel in dict.fromkeys(output // size for output in outputs if not self.has(output)):
            if panel < self._last:
                self._take(panel)
                missing = True
        return missing

    @torch.inference_mode()
    def _take(self, panel: int) -> None:
        size, full = self._whole.panel, self._panels == len(self._weights)
        if full and not self._places:
            return
        place = self._places.pop(next(iter(self._places))) if full else self._panels
        self._places[panel] = place
        here, there = slice(place * size, (place + 1) * size), slice(panel * size, (panel + 1) * size)
        self._weights[place] = self._whole.weights[panel]
        self._ids[here] = torch.arange(there.start, there.stop)
        if self._own_bias is not None and self._bias is not None:
            self._own_bias[here] = self._bias[there]

    def product(self) -> ProductStruct:
        """The struct of the product, which is valid as long as this object is and nothing is added."""
        outputs = len(self.ids)
        packed = self._whole._replace(outputs=outputs, weights=self._weights[: self._panels])
        return packed.product(None if self._own_bias is None else self._own_bias[:outputs])
