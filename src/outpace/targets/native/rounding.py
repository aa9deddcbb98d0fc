"""The rounded weights of a native runner, for drafts: its products in few bits, all else is that runner's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from outpace.core import UnsupportedModel
from outpace.native.layers import SHARE
from outpace.targets.cpu.layouts import Blocks, multiply
from outpace.targets.cpu.quants import Quants
from outpace.targets.cpu.rounding import BYTES
from outpace.targets.native.runner import NativeRunner
from outpace.targets.native.weights import Product

_WORTH = 1.5  # bits of a file's weights, in multiples of those that they are rounded to, for which it pays


class NativeRounding:
    """Rounded products in place of a runner's; the attributes are those of ``Rounding``.

    Args:
        bits: of the weights, 8 or 4. Products whose inputs 4 bits do not take have 8.
    """

    def __init__(self, runner: NativeRunner, bits: int) -> None:
        self._runner, self._bits = runner, bits
        self.layers = runner.weights.products
        self.live: list[nn.Module] = []  # what the runner holds, the target follows
        self.numbers = Counter[int]()
        for product in self.layers:
            self.numbers[self._bits_of(product)] += product.packed.inputs * product.packed.outputs
        self.bytes = int(sum(BYTES[each] * count for each, count in self.numbers.items()))
        head = self.layers[-1].packed
        self.head_share = BYTES[self._bits_of(self.layers[-1])] * head.inputs * head.outputs / self.bytes
        self.refused = next(self._refused(), None)

    def _refused(self) -> Iterator[str]:
        for product in self.layers:
            packed = product.packed
            if isinstance(packed, Quants) and packed.bits < _WORTH * self._bits:
                yield f"its file has {packed.bits:.1f} bits a weight, rounded to fewer it gains little"
            elif isinstance(packed, Blocks) and packed.bits <= self._bits:
                yield f"its weights have {packed.bits} bits already, rounded to {self._bits} it gains nothing"

    def _bits_of(self, product: Product) -> int:
        return 8 if product.packed.inputs % SHARE else self._bits

    @torch.inference_mode()
    def multiply(self) -> None:
        """Multiply a row by the weights of each product, to time it."""
        for packed, bias, _ in self.layers:
            multiply(torch.zeros(1, packed.inputs, dtype=packed.dtype), packed, bias)

    def made(self) -> NativeRunner:
        """A runner with rounded products, made one after the other.

        Raises:
            UnsupportedModel: the reason is ``refused``.
        """
        if self.refused:
            raise UnsupportedModel(self.refused)
        rounded = [self._rounded(product) for product in self.layers]
        return self._runner.with_products(rounded)

    def _rounded(self, product: Product) -> Product:
        packed, dtype = product.packed, product.packed.dtype
        return product._replace(
            packed=Blocks.pack([packed.unpack()], self._bits_of(product))._replace(dtype=dtype)
        )
