"""Products of a linear layer by a kernel: the contract, and the layer's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.native.forward import ProductStruct


class Kernel(ABC):
    """A kernel that multiplies rows by the weights of a linear layer.

    Attributes:
        name: name in reports.
        dtypes: supported dtypes of weights.
        least: minimum number of weights of a layer for which its call overhead pays, by their dtype; 1 by
            default.
        copies: it keeps a copy of the weights.
        rounds: this copy is rounded to fewer bits.
        wide: its rows are float32 for any dtype of the weights.
        alike: it sums all outputs in one way, whatever their number, so that a trial of a few shows it.
    """

    name: ClassVar[str]
    dtypes: ClassVar[frozenset[torch.dtype]]
    least: ClassVar[Mapping[torch.dtype, int]] = {}
    copies: ClassVar[bool] = True
    rounds: ClassVar[bool] = False
    wide: ClassVar[bool] = False
    alike: ClassVar[bool] = False

    def takes(self, weight: Tensor) -> bool:
        """True if a layer with these weights is large enough for it."""
        return weight.numel() >= self.least.get(weight.dtype, 1)

    @abstractmethod
    def pack(self, weight: Tensor) -> Any:
        """Pack weights, [outputs, inputs], for ``multiply``.

        Returns:
            None if the kernel does not take their shape, or if they would be rounded and ``rounds`` is False.

        Raises:
            RuntimeError: this processor, or this torch, does not support it.
        """

    @abstractmethod
    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        """Multiply rows [n, inputs] -> [n, outputs], in the dtype of the rows."""

    def product(self, packed: Any, bias: Tensor | None) -> ProductStruct | None:
        """The compiled product, with the addresses of these tensors; None if it is not compiled."""
        return None


class StockKernel(Kernel):
    """The stock layer's kernel, without packing."""

    name = "as it is"
    dtypes = frozenset((torch.float32, torch.bfloat16, torch.float16))
    copies = False

    def pack(self, weight: Tensor) -> Any:
        return weight

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(rows, packed, bias)
