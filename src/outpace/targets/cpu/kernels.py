"""Kernels of linear layers on a CPU. ``trials.py`` shows which is fastest here, and which are exact."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from outpace.native.layers import DTYPES, ProductStruct, byref, functions
from outpace.native.pointers import pointer, pointer_or_null
from outpace.targets.kernel import Kernel, Stock


class Panels(NamedTuple):
    """Weights as ``native/layers.c`` reads them.

    Attributes:
        panel: outputs of a panel.
        pair: inputs of a pair.
        weights: [panels, pairs of inputs, panel, pair], padded with zeros.
        scales: of the padded outputs, float32, if the weights are int8.
    """

    inputs: int
    outputs: int
    panel: int
    pair: int
    weights: Tensor
    scales: Tensor | None = None

    @classmethod
    def pack(cls, library: Any, weight: Tensor, scales: Tensor | None = None) -> Panels:
        """Weights, [outputs, inputs], and their scales, [outputs].

        Args:
            library: the functions for the dtype of the rows.
        """
        (outputs, inputs), panel, pair = weight.shape, library.panel_outputs(), library.pair_inputs()
        missing = -outputs % panel
        whole = nn.functional.pad(weight, (0, -inputs % pair, 0, missing))
        packed = whole.view(-1, panel, whole.shape[1] // pair, pair).transpose(1, 2).contiguous()
        padded = None if scales is None else nn.functional.pad(scales, (0, missing))
        return cls(inputs, outputs, panel, pair, packed, padded)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows and biases: that of the weights, or bfloat16 if these are int8."""
        return self.weights.dtype if self.scales is None else torch.bfloat16

    def product(self, bias: Tensor | None) -> ProductStruct:
        panels, pairs = -(-self.outputs // self.panel), -(-self.inputs // self.pair)
        dtype = self.dtype if self.scales is None else torch.int8
        return ProductStruct(
            inputs=self.inputs,
            outputs=self.outputs,
            weights=pointer(self.weights, dtype, panels, pairs, self.panel, self.pair),
            bias=pointer_or_null(bias, self.dtype, self.outputs),
            scales=pointer_or_null(self.scales, torch.float32, panels * self.panel),
        )

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply rows [n, inputs] -> [n, outputs]."""
        inputs, out = rows.contiguous(), rows.new_empty((len(rows), self.outputs))
        count, dtype = len(rows), self.dtype
        library: Any = functions(dtype)
        library.multiply(
            byref(self.product(bias)),
            count,
            pointer(inputs, dtype, count, self.inputs),
            pointer(out, dtype, count, self.outputs),
        )
        return out


class Compiled(Kernel):
    """Products of ``native/layers.c``, in its layout for a few rows."""

    name = "compiled"
    dtypes = DTYPES
    alike = True
    # A call costs 5 us more than the stock layer's.
    least: ClassVar = {torch.float32: 1 << 14, torch.bfloat16: 1 << 12}

    def pack(self, weight: Tensor) -> Any:
        library = functions(weight.dtype)
        if isinstance(library, str):
            raise RuntimeError(library)
        return Panels.pack(library, weight)

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if rows.dtype != packed.weights.dtype:  # the function would read past the end of the weights
            raise RuntimeError(f"a layer packed in {packed.weights.dtype} got rows in {rows.dtype}")
        product: Tensor = packed.multiply(rows, bias)
        return product

    def product(self, packed: Any, bias: Tensor | None) -> ProductStruct | None:
        product: ProductStruct = packed.product(bias)
        return product


class OneDNN(Kernel):
    """oneDNN's layout for a few rows. In bfloat16 for processors with instructions for it."""

    name = "oneDNN"
    dtypes = frozenset((torch.float32, torch.bfloat16))
    # A call costs about 20 us more than the stock layer's in float32, and as much in bfloat16.
    least: ClassVar = {torch.float32: 1 << 17, torch.bfloat16: 1 << 14}

    def pack(self, weight: Tensor) -> Any:
        return torch.ops.mkldnn._reorder_linear_weight.default(weight, 8)

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
        return product


class HalfFBGEMM(Kernel):
    """FBGEMM's float16 weights with rows in float32: exact products, and half the bytes of float32.

    bfloat16 has 8 significant bits and float16 has 11, so bfloat16 weights fit except for their range. The
    weights of each output are multiplied by a power of two that brings the small ones into float16's range,
    and the products by its inverse.
    """

    name = "FBGEMM float16"
    dtypes = frozenset((torch.bfloat16, torch.float16))
    least: ClassVar = {torch.bfloat16: 1 << 16, torch.float16: 1 << 16}
    wide = True

    def pack(self, weight: Tensor) -> Any:
        wide = weight.float()
        # Below 2^15, since float16's maximum is 65504; float16 weights fit without scaling.
        exponents = 15 - torch.frexp(wide.abs().amax(dim=1)).exponent
        if weight.dtype == torch.float16:
            exponents.zero_()
        lift = torch.ldexp(torch.ones(len(wide)), exponents)[:, None]
        lifted = wide * lift
        if not torch.equal(lifted.half().float(), lifted):
            return None
        return torch.ops.quantized.linear_prepack_fp16.default(lifted, None), 1 / lift[:, 0]

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        weight, scale = packed
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(rows.float(), weight)
        product *= scale
        if bias is not None:
            product += bias
        return product.to(rows.dtype)


class Int8(Kernel):
    """int8 weights with a scale per output, rows in bfloat16: products of ``layers.c``, otherwise aten's."""

    name = "int8"
    dtypes = frozenset((torch.bfloat16,))
    rounds = True
    _step = 16  # aten's kernel reads beyond a row if its inputs are not a multiple of this

    def pack(self, weight: Tensor) -> Any:
        # Rounded before it is used, so that an all-zero output does not divide by zero either.
        scale = (weight.float().abs().amax(dim=1) / 127).clamp(min=1e-30).bfloat16()
        numbers = (weight.float() / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        library = functions(torch.bfloat16)
        panels = None if isinstance(library, str) else Panels.pack(library, numbers, scale.float())
        return panels or (nn.functional.pad(numbers, (0, -weight.shape[1] % self._step)), scale)

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if isinstance(packed, Panels):
            if rows.dtype != torch.bfloat16:
                raise RuntimeError(f"a layer with int8 weights takes rows in bfloat16, not {rows.dtype}")
            return packed.multiply(rows, bias)
        if missing := -rows.shape[1] % self._step:
            rows = nn.functional.pad(rows, (0, missing))
        product: Tensor = torch.ops.aten._weight_int8pack_mm.default(rows, *packed)
        return product if bias is None else product.add_(bias)

    def product(self, packed: Any, bias: Tensor | None) -> ProductStruct | None:
        return packed.product(bias) if isinstance(packed, Panels) else None


class Int4(Kernel):
    """aten's int4 weights: a scale and a zero per output and 32 inputs, rows in bfloat16."""

    name = "int4"
    dtypes = frozenset((torch.bfloat16,))
    rounds = True
    _group = 32  # inputs

    def pack(self, weight: Tensor) -> Any:
        outputs, inputs = weight.shape
        if inputs % self._group or outputs % 16:
            return None
        groups = weight.float().view(outputs, -1, self._group)
        low = groups.amin(dim=-1, keepdim=True)
        # The kernel's weight is (number - 8) * scale + zero; both are rounded before the numbers are chosen.
        scale = ((groups.amax(dim=-1, keepdim=True) - low) / 15).clamp_(min=1e-30).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()
        numbers = ((groups - zero.float()) / scale.float() + 8).round_().clamp_(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(
            numbers.view(outputs, inputs).int(), 1
        )
        return packed, torch.cat([scale, zero], dim=-1).transpose(0, 1).contiguous()

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        numbers, scales = packed
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            rows, numbers, self._group, scales
        )
        return product if bias is None else product.add_(bias)


STOCK, COMPILED = Stock(), Compiled()
KERNELS: tuple[Kernel, ...] = (STOCK, COMPILED, OneDNN(), HalfFBGEMM())
QUANTISED: dict[str, Kernel] = {kernel.name: kernel for kernel in (Int8(), Int4())}
