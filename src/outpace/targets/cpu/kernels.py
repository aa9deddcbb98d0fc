"""Kernels of linear layers on a CPU. ``trials.py`` shows which is fastest here, and which are exact."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.native.forward import ProductStruct
from outpace.native.layers import DTYPES, SHARE, functions
from outpace.targets.cpu.layouts import Blocks, Panels, multiply
from outpace.targets.kernel import Kernel, StockKernel


class Compiled(Kernel):
    """Products of ``native/tiles.h``, in its layout for a few rows."""

    name = "compiled"
    dtypes = DTYPES
    alike = True
    # A call costs 5 us more than the stock layer's.
    least: ClassVar = {torch.float32: 1 << 14, torch.bfloat16: 1 << 12}

    def pack(self, weight: Tensor) -> Any:
        library = functions(weight.dtype)
        if isinstance(library, str):
            raise RuntimeError(library)
        return Panels.pack([weight])

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if rows.dtype != packed.dtype:
            raise RuntimeError(f"a layer packed in {packed.dtype} got rows in {rows.dtype}")
        return multiply(rows, packed, bias)

    def product(self, packed: Any, bias: Tensor | None) -> ProductStruct | None:
        product: ProductStruct = packed.product(bias)
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


class Rounded(Kernel):
    """Weights rounded to few bits, rows in bfloat16: products of ``native/rounded.h``, otherwise aten's.

    Those of ``rounded.h`` round rows too, to 8 bits in blocks of ``SHARE`` inputs, as llama.cpp does.
    """

    dtypes = frozenset((torch.bfloat16,))
    rounds = True
    bits: ClassVar[int]

    def pack(self, weight: Tensor) -> Any:
        if isinstance(functions(torch.bfloat16), str):
            return self._pack(weight)
        return Blocks.pack([weight], self.bits) if self.fits(weight.shape[1]) else None

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if isinstance(packed, Blocks):
            if rows.dtype != packed.dtype:
                raise RuntimeError(
                    f"a layer with {self.name} weights takes rows in {packed.dtype}, not {rows.dtype}"
                )
            return multiply(rows, packed, bias)
        product = self._multiply(rows.contiguous(), packed)
        return product if bias is None else product.add_(bias)

    def product(self, packed: Any, bias: Tensor | None) -> ProductStruct | None:
        return packed.product(bias) if isinstance(packed, Blocks) else None

    def fits(self, inputs: int) -> bool:
        """True if the blocks take weights of this number of inputs."""
        return True

    @abstractmethod
    def _pack(self, weight: Tensor) -> Any:
        """``pack`` for aten's product."""

    @abstractmethod
    def _multiply(self, rows: Tensor, packed: Any) -> Tensor:
        """aten's product."""


class Int8(Rounded):
    """int8 weights; aten's have a scale per output, and rows are not rounded."""

    name, bits = "int8", 8
    _step = 16  # aten's kernel reads beyond a row if its inputs are not a multiple of this

    def _pack(self, weight: Tensor) -> Any:
        # Rounded before it is used, so that an all-zero output does not divide by zero either.
        scale = (weight.float().abs().amax(dim=1) / 127).clamp(min=1e-30).bfloat16()
        numbers = (weight.float() / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return nn.functional.pad(numbers, (0, -weight.shape[1] % self._step)), scale

    def _multiply(self, rows: Tensor, packed: Any) -> Tensor:
        if missing := -rows.shape[1] % self._step:
            rows = nn.functional.pad(rows, (0, missing))
        product: Tensor = torch.ops.aten._weight_int8pack_mm.default(rows, *packed)
        return product


class Int4(Rounded):
    """int4 weights with a scale and a zero per output and 32 inputs."""

    name, bits = "int4", 4

    def fits(self, inputs: int) -> bool:
        return not inputs % SHARE

    def _pack(self, weight: Tensor) -> Any:
        outputs, inputs = weight.shape
        if not self.fits(inputs) or outputs % 16:
            return None
        groups = weight.float().view(outputs, -1, SHARE)
        low = groups.amin(dim=-1, keepdim=True)
        # The kernel's weight is (number - 8) * scale + zero; both are rounded before the numbers are chosen.
        scale = ((groups.amax(dim=-1, keepdim=True) - low) / 15).clamp_(min=1e-30).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()
        numbers = ((groups - zero.float()) / scale.float() + 8).round_().clamp_(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(
            numbers.view(outputs, inputs).int(), 1
        )
        return packed, torch.cat([scale, zero], dim=-1).transpose(0, 1).contiguous()

    def _multiply(self, rows: Tensor, packed: Any) -> Tensor:
        numbers, scales = packed
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(rows, numbers, SHARE, scales)
        return product


STOCK, COMPILED = StockKernel(), Compiled()
KERNELS: tuple[Kernel, ...] = (STOCK, COMPILED, HalfFBGEMM())
QUANTISED: dict[str, Rounded] = {kernel.name: kernel for kernel in (Int8(), Int4())}
