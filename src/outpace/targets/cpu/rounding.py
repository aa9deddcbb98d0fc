"""A step on a CPU with rounded linear layers, which drafts for the step that it was made of.

All else is that step's: embeddings, norms, biases, the cache. Layers are rounded one after another, some
outputs at a time, so that little more memory is needed than what the rounded weights take.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel
from outpace.native.forward import ProductStruct
from outpace.native.layers import DTYPES, SHARE, functions
from outpace.targets.cpu.kernels import QUANTISED, STOCK
from outpace.targets.cpu.layouts import Blocks, Panels, multiply
from outpace.targets.cpu.linear import Linear, linears_of
from outpace.targets.cpu.quants import Quantised
from outpace.targets.inputs.surgery import exchange
from outpace.targets.kernel import Kernel

BYTES = {8: (2 + SHARE) / SHARE, 4: (4 + SHARE / 2) / SHARE}  # of a rounded number, with scales and zeros
_DTYPES = frozenset((*DTYPES, torch.float16, torch.float64))


class _InFloat(Kernel):
    """Products of rounded weights for rows in a dtype without compiled functions, by those for float32."""

    rounds = True
    dtypes = _DTYPES - DTYPES

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def pack(self, weight: Tensor) -> Any:
        raise NotImplementedError("weights are rounded by ``Rounding``")

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        product = multiply(rows.float(), packed, None).to(rows.dtype)
        return product if bias is None else product.add_(bias)

    def product(self, packed: Any, bias: Tensor | None) -> ProductStruct | None:
        return None


class Rounding:
    """Replacement of a step's linear layers by rounded ones.

    Args:
        step: a step as ``Modules`` has it: packed or not.
        bits: of the weights, 8 or 4. The head has 8, and so have layers whose inputs 4 bits do not take.

    Attributes:
        layers: those that are replaced.
        refused: why the step cannot be rounded; None if it can.
        numbers: bits -> number of weights that are rounded to them.
        bytes: of the rounded weights.
        head_share: the head's share of them, if it can be cut to the first tokens; otherwise 0.
        live: the layers whose weights the step reads from the model, and has no copy of.
    """

    head_share = 0.0

    def __init__(self, step: Any, bits: int) -> None:
        self._step = step
        self._bits = bits
        packed = [module for module in step.modules() if isinstance(module, Linear)]
        own = [layer for layer in packed if layer.kernel is STOCK]
        plain = linears_of(step, _DTYPES)
        self.layers: list[Any] = [*plain, *packed]
        self.live: list[nn.Module] = [*plain, *own]
        self.refused = self._why_refused()
        self.numbers = Counter[int]()
        for layer in self.layers:
            self.numbers[self._bits_of(layer)] += layer.in_features * layer.out_features
        self.bytes = int(sum(BYTES[each] * count for each, count in self.numbers.items()))

    def _why_refused(self) -> str | None:
        if isinstance(why := functions(torch.float32), str):
            return f"products with rounded weights are compiled functions: {why}"
        if not self.layers:
            return "it has no plain linear layers"
        for layer in self.layers:
            packed = layer.packed if isinstance(layer, Linear) else None
            if isinstance(packed, Blocks) and packed.bits <= self._bits:
                return (
                    f"its weights have {packed.bits} bits already, rounded to {self._bits} it gains nothing"
                )
            if isinstance(layer, Linear) and isinstance(layer.kernel, Quantised):
                return "its weights are those of a GGUF file, which are rounded on native steps alone"
            if _source_of(layer) is None:
                return "the weights of its layers were released; load it again"
        return None

    def made(self) -> Any:
        """A copy of the step with rounded layers.

        Raises:
            UnsupportedModel: the reason is ``refused``.
        """
        if self.refused:
            raise UnsupportedModel(self.refused)
        layers = set(self.layers)
        step = exchange(self._step, lambda module: self._rounded(module) if module in layers else None, None)
        return step

    @torch.inference_mode()
    def multiply(self) -> None:
        """Multiply a row by the weights of each layer as the step has them, to time it."""
        for layer in self.layers:
            layer(torch.zeros(1, layer.in_features, dtype=self._step.dtype))

    def _bits_of(self, layer: Any) -> int:
        head = layer is self._step.get_output_embeddings()
        return 8 if head or layer.in_features % SHARE else self._bits

    def _rounded(self, layer: Any) -> Linear:
        source = _source_of(layer)
        assert source is not None
        weight = source if isinstance(source, Tensor) else source.unpack()
        dtype = weight.dtype
        kernel: Kernel = QUANTISED[f"int{self._bits_of(layer)}"]
        if dtype not in DTYPES:
            kernel, dtype = _InFloat(kernel.name), torch.float32
        packed = Blocks.pack([weight], self._bits_of(layer))._replace(dtype=dtype)
        sizes = layer.in_features, layer.out_features
        shape = nn.Linear(*sizes, bias=False, device="meta", dtype=weight.dtype)
        shape.bias = layer.bias
        return Linear(shape, kernel, packed, 1)


def _source_of(layer: Any) -> Tensor | Panels | Blocks | None:
    """Where the weight of a layer of a step is read; None if only a copy is left that cannot be."""
    found: Tensor
    if not isinstance(layer, Linear):
        found = layer.weight
    elif isinstance(layer.packed, Panels | Blocks):
        return layer.packed
    else:
        found = layer.packed if layer.kernel is STOCK else layer.weight
    return None if found.is_meta else found
