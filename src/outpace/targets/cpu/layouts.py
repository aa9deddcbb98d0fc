"""Layouts of weights as compiled functions read them: panels of floats, blocks of rounded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel
from outpace.native import memory
from outpace.native.forward import ProductStruct
from outpace.native.layers import DTYPES, SHARE, byref, functions
from outpace.native.pointers import address, check, pointer, pointer_or_null, row_addresses


class Panels(NamedTuple):
    """Weights as ``native/tiles.h`` reads them.

    Attributes:
        panel: outputs of a panel.
        pair: inputs of a pair.
        weights: [panels, pairs of inputs, panel, pair], padded with zeros.
    """

    inputs: int
    outputs: int
    panel: int
    pair: int
    weights: Tensor

    @classmethod
    def pack(cls, weights: Sequence[Tensor], order: Tensor | None = None) -> Panels:
        dtype, inputs, outputs = weights[0].dtype, weights[0].shape[1], sum(map(len, weights))
        library: Any = functions(dtype)
        panel, pair = int(library.panel_outputs()), int(library.pair_inputs())
        room = memory.zeros(-(-outputs // panel), -(-inputs // pair), panel, pair, dtype=dtype)
        found = cls(inputs, outputs, panel, pair, room)
        _fill(found, weights, order)
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    def unpack(self) -> Tensor:
        library: Any = functions(self.dtype)
        rows = torch.empty(self.outputs, self.inputs, dtype=self.dtype)
        library.unpack(byref(self.product(None)), pointer(rows, self.dtype, self.outputs, self.inputs))
        return rows

    def product(self, bias: Tensor | None) -> ProductStruct:
        panels, pairs = -(-self.outputs // self.panel), -(-self.inputs // self.pair)
        return ProductStruct(
            inputs=self.inputs,
            outputs=self.outputs,
            weights=pointer(self.weights, self.dtype, panels, pairs, self.panel, self.pair),
            bias=pointer_or_null(bias, self.dtype, self.outputs),
        )


class Blocks(NamedTuple):
    """Weights rounded to 8 or 4 bits, in the blocks of ``native/rounded.h``.

    A block has a scale, with 4 bits a zero too, per output and ``SHARE`` inputs.

    Attributes:
        panel: outputs of a panel.
        weights: bytes, [panels, blocks of inputs, bytes of a block], padded with zeros.
        dtype: of rows and biases.
    """

    inputs: int
    outputs: int
    bits: int
    panel: int
    weights: Tensor
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def pack(cls, weights: Sequence[Tensor], bits: int, order: Tensor | None = None) -> Blocks:
        """Weights, [outputs, inputs] each, in any dtype of floats; see ``_fill``."""
        inputs, outputs, panel = weights[0].shape[1], sum(map(len, weights)), rounded_panel()
        size = _bytes_of_block(bits, panel)
        room = memory.zeros(-(-outputs // panel), -(-inputs // SHARE), size, dtype=torch.uint8)
        found = cls(inputs, outputs, bits, panel, room)
        _fill(found, weights, order)
        return found

    @classmethod
    def of_numbers(cls, numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Blocks:
        """Weights that are rounded already: (number - zero) * scale.

        Args:
            numbers: [outputs, inputs], integers below 2^bits; the inputs a multiple of ``SHARE``.
            scales, zeros: [outputs, groups], for as many inputs each, a multiple of ``SHARE`` too. Scales are
                rounded to bfloat16, and with 4 bits their products with zeros; with 8 zeros are all 128.
        """
        (outputs, inputs), times = numbers.shape, numbers.shape[1] // SHARE // scales.shape[1]
        scale = scales.float().bfloat16()
        zero = (-zeros.float() * scale.float()).bfloat16()
        panel = rounded_panel()
        scale, zero = (_shares(part.repeat_interleave(times, dim=1), panel, 1) for part in (scale, zero))
        signed = numbers.to(torch.int16).sub_(128 if bits == 8 else 0).to(torch.int8)
        return cls(inputs, outputs, bits, panel, _blocks(_shares(signed, panel), scale, zero, bits))

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """Blocks with the outputs of several, of whose outputs all but the last have whole panels.

        No copy is made of parts that ``split`` returned.
        """
        each = [part.weights for part in parts]
        first = each[0]
        ends = [weights.storage_offset() + weights.numel() for weights in each]
        if [weights.storage_offset() for weights in each[1:]] == ends[:-1] and all(
            weights.untyped_storage() is first.untyped_storage() for weights in each
        ):
            panels = sum(map(len, each))
            weights = first.as_strided((panels, *first.shape[1:]), first.stride())
        else:
            weights = torch.cat(each)
        return parts[0]._replace(outputs=sum(part.outputs for part in parts), weights=weights)

    def split(self, outputs: Sequence[int]) -> list[Blocks]:
        """Views of the blocks of some outputs each, in turn."""
        views = self.weights.split([-(-count // self.panel) for count in outputs])
        return [
            self._replace(outputs=count, weights=view) for count, view in zip(outputs, views, strict=True)
        ]

    def unpack(self) -> Tensor:
        """Weights of 8 bits as numbers, [outputs, inputs]."""
        check(self.bits == 8, f"weights of 8 bits, not {self.bits}")
        panels, blocks, _ = self.weights.shape
        scale, numbers = self.weights.split([2 * self.panel, SHARE * self.panel], dim=-1)
        quads = numbers.view(torch.int8).reshape(panels, blocks, SHARE // 4, self.panel, 4)
        # [panels, outputs of a panel, blocks, quads of inputs, 4]
        scaled: Tensor = quads.permute(0, 3, 1, 2, 4).float() * _scales(scale)
        return scaled.reshape(panels * self.panel, -1)[: self.outputs, : self.inputs].to(self.dtype)

    def product(self, bias: Tensor | None) -> ProductStruct:
        panels, blocks = -(-self.outputs // self.panel), -(-self.inputs // SHARE)
        size = _bytes_of_block(self.bits, self.panel)
        return ProductStruct(
            inputs=self.inputs,
            outputs=self.outputs,
            bits=self.bits,
            weights=pointer(self.weights, torch.uint8, panels, blocks, size),
            bias=pointer_or_null(bias, self.dtype, self.outputs),
        )


def _fill(packed: Panels | Blocks, weights: Sequence[Tensor], order: Tensor | None) -> None:
    """Write the weights of several layers side by side, with all threads, from where they are in memory."""
    dtype = weights[0].dtype if weights[0].dtype in DTYPES else torch.float32
    rows = [weight.detach().to(dtype) for weight in weights]
    rows = [part if part.stride(1) == 1 else part.contiguous() for part in rows]
    places = row_addresses(rows, dtype, packed.inputs)
    if order is not None:
        places = places[order.numpy()]
    check(len(places) == packed.outputs, f"{packed.outputs} outputs, not {len(places)}")
    library: Any = functions(dtype)
    if library.pack(byref(packed.product(None)), address(places, np.uint64, packed.outputs)):
        raise UnsupportedModel(
            "packed weights differ from those that they were packed from"
            + (", as those do that are not finite" if isinstance(packed, Blocks) else "")
        )


def _bytes_of_block(bits: int, panel: int) -> int:
    return (2 + SHARE if bits == 8 else 4 + SHARE // 2) * panel


def rounded_panel() -> int:
    """Outputs of a panel of rounded weights, as the compiled functions read it here; 1 if there are none."""
    library: Any = functions(torch.bfloat16)
    return 1 if isinstance(library, str) else int(library.rounded_outputs())


def _shares(matrix: Tensor, panel: int, share: int = SHARE) -> Tensor:
    """A matrix [outputs, inputs] as [panels, blocks, outputs, inputs of a block], padded with zeros."""
    whole = nn.functional.pad(matrix, (0, -matrix.shape[1] % share, 0, -len(matrix) % panel))
    return whole.view(-1, panel, whole.shape[1] // share, share).transpose(1, 2)


def _scales(parts: Tensor) -> Tensor:
    """Scales of blocks as bytes, [panels, blocks, bytes], as factors [panels, outputs, blocks, 1, 1]."""
    return parts.contiguous().view(torch.bfloat16).float().transpose(1, 2)[..., None, None]


def _blocks(numbers: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Bytes of blocks, from what ``_shares`` returns of numbers, and of scales and zeros, one a block."""
    quads = numbers.unflatten(-1, (-1, 4)).transpose(2, 3)  # [panels, blocks, quads, outputs, 4]
    if bits == 4:
        first, last = quads.chunk(2, dim=2)
        quads = first | last << 4
    heads = [scale, zero] if bits == 4 else [scale]
    parts = [part[..., 0].contiguous().view(torch.uint8) for part in heads]
    return torch.cat([*parts, quads.flatten(2).view(torch.uint8)], dim=-1).contiguous()


class PackedWeights(Protocol):
    """Weights of a product in the order of a compiled function, and the dtype of its rows."""

    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def product(self, bias: Tensor | None) -> ProductStruct: ...


def multiply(rows: Tensor, packed: PackedWeights, bias: Tensor | None) -> Tensor:
    """Multiply rows [n, inputs] -> [n, outputs] by compiled functions.

    Raises:
        OutpaceError: rows or bias are not what the function takes. MemoryError: it finds no memory.
    """
    inputs, count, dtype = rows.contiguous(), len(rows), packed.dtype
    out = rows.new_empty((count, packed.outputs))
    library: Any = functions(dtype)
    failed = library.multiply(
        byref(packed.product(bias)),
        count,
        pointer(inputs, dtype, count, packed.inputs),
        pointer(out, dtype, count, packed.outputs),
    )
    if failed:
        raise MemoryError("a product found no memory for its workspace")
    return out
