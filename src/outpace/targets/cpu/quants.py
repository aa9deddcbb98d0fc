"""Weights as GGUF files have them, in panels for compiled products, and the modules that hold them.

A file's blocks are repacked, and no number in them changes: ``QuantPart.unpack`` has those of
``gguf.quants.dequantize`` to the last bit. A product rounds its rows to 8 bits in blocks of 32 numbers, as
``native/quants.h`` says; with weights in floats it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from outpace.native import memory
from outpace.native.forward import MARKED, ProductStruct, QuantPartStruct, QuantsStruct
from outpace.native.layers import DTYPES, functions
from outpace.native.pointers import check, pointer, pointer_or_null, struct_pointer
from outpace.targets.cpu.layouts import multiply
from outpace.targets.cpu.linear import RoundedLinear, Table
from outpace.targets.kernel import Kernel

# ggml's names of types -> its numbers, which ``native/quants.h`` has too.
TYPES: Mapping[str, int] = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10, "q3_k": 11,
    "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_nl": 20, "iq4_xs": 23, "bf16": 30, "mxfp4": 39,
}  # fmt: skip


def compiled() -> Any:
    """The compiled functions, which are the same for any dtype of rows; or why there are none."""
    return functions(torch.float32)


class QuantPart(NamedTuple):
    """A matrix of a file in panels.

    Attributes:
        type: ggml's number.
        weights: bytes, [panels, bytes of one], padded with zeros.
    """

    type: int
    inputs: int
    outputs: int
    weights: Tensor

    @classmethod
    def pack(cls, type_: int, blocks: Tensor, inputs: int, order: Tensor | None = None) -> QuantPart:
        """A matrix from a file.

        Args:
            blocks: bytes, [outputs, bytes of a row].
            order: the file's row of each output, int32; None for the file's own order.
        """
        library, outputs = compiled(), len(blocks)
        panels = -(-outputs // library.rounded_outputs())
        weights = memory.zeros(panels, library.quant_panel(type_, inputs), dtype=torch.uint8)
        if order is not None:
            check(0 <= int(order.min()) <= int(order.max()) < outputs, "rows of the matrix")
        library.quant_pack(
            type_,
            pointer(blocks, torch.uint8, outputs, row_bytes(type_, inputs)),
            pointer_or_null(order, torch.int32, outputs),
            inputs,
            outputs,
            pointer(weights, torch.uint8, *weights.shape),
        )
        return cls(type_, inputs, outputs, weights)

    def unpack(self) -> Tensor:
        """The numbers, in float32, [outputs, inputs]."""
        found = torch.empty(self.outputs, self.inputs)
        size = compiled().quant_panel(self.type, self.inputs)
        weights = pointer(self.weights, torch.uint8, len(self.weights), size)
        out = pointer(found, torch.float32, self.outputs, self.inputs)
        compiled().quant_unpack(self.type, weights, self.inputs, self.outputs, out)
        return found


def row_bytes(type_: int, inputs: int) -> int:
    """Bytes of a row of a matrix in a file.

    Raises:
        OutpaceError: the type is unknown, or has blocks of another size.
    """
    library = compiled()
    numbers = library.quant_numbers(type_)
    check(
        numbers > 0 and not inputs % numbers, f"rows of whole blocks of a known type, not {inputs} of {type_}"
    )
    return int(inputs // numbers * library.quant_bytes(type_))


@dataclass(frozen=True, eq=False)
class Quants:
    """The weights of a product: matrices with the same inputs, one after the other.

    Attributes:
        dtype: of rows and biases.
    """

    parts: Sequence[QuantPart]
    dtype: torch.dtype

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def weights(self) -> Tensor:
        """The panels of the only matrix."""
        [part] = self.parts
        return part.weights

    @property
    def bits(self) -> float:
        """Bits of a weight, with its share of the scales."""
        numbers = sum(part.weights.numel() for part in self.parts)
        return 8 * numbers / (self.inputs * self.outputs)

    @classmethod
    def joined(cls, several: Sequence[Quants]) -> Quants:
        """The outputs of several products; no weights are copied."""
        return cls([part for one in several for part in one.parts], several[0].dtype)

    def unpack(self) -> Tensor:
        """The weights, [outputs, inputs]."""
        return torch.cat([part.unpack() for part in self.parts])

    @cached_property
    def _struct(self) -> QuantsStruct:
        library, inputs = compiled(), self.inputs
        parts = [
            QuantPartStruct(
                outputs=part.outputs,
                type=part.type,
                weights=pointer(
                    part.weights,
                    torch.uint8,
                    -(-part.outputs // library.rounded_outputs()),
                    library.quant_panel(part.type, inputs),
                ),
            )
            for part in self.parts
        ]
        return QuantsStruct(parts=len(parts), part=(QuantPartStruct * len(parts))(*parts))

    def product(self, bias: Tensor | None) -> ProductStruct:
        """The struct, which is valid as long as this object is."""
        return ProductStruct(
            inputs=self.inputs,
            outputs=self.outputs,
            bits=MARKED,
            weights=struct_pointer(self._struct),
            bias=pointer_or_null(bias, self.dtype, self.outputs),
        )


class Quantised(Kernel):
    """Products with weights of a GGUF file.

    Args:
        name: ggml's, of the type.
    """

    dtypes: ClassVar = DTYPES
    rounds = True

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def pack(self, weight: Tensor) -> Any:
        raise NotImplementedError("weights are read from a file")

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if rows.dtype != packed.dtype:
            raise RuntimeError(f"weights of a GGUF file for rows in {packed.dtype} got {rows.dtype}")
        return multiply(rows, packed, bias)

    def product(self, packed: Any, bias: Tensor | None) -> ProductStruct | None:
        product: ProductStruct = packed.product(bias)
        return product


KERNELS = {number: Quantised(name) for name, number in TYPES.items()}


class QuantLinear(RoundedLinear):
    """A linear layer whose weights are those of a GGUF file."""

    def __init__(self, linear: nn.Linear, part: QuantPart, dtype: torch.dtype) -> None:
        super().__init__(linear, KERNELS[part.type])
        check(
            (part.outputs, part.inputs) == (linear.out_features, linear.in_features), "weights of its shape"
        )
        self.take(Quants([part], dtype))


class QuantEmbedding(Table):
    """Embeddings that are looked up in the blocks of a file.

    Args:
        embedding: the module that this replaces.
        blocks: bytes, [tokens, bytes of a row].

    Attributes:
        weight: of the right shape, dtype and device, and without memory.
    """

    numbers: Tensor

    def __init__(self, embedding: Any, type_: int, blocks: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self._type = type_
        self.register_buffer("numbers", blocks, persistent=False)
        self.dtype = dtype
        scale = getattr(embedding, "embed_scale", None)
        self.embed_scale = None if scale is None else torch.as_tensor(scale, dtype=dtype)
        self._line = row_bytes(type_, self.embedding_dim)

    @property
    def weight(self) -> Tensor:
        return torch.zeros(1, dtype=self.dtype).expand(self.num_embeddings, self.embedding_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.reshape(-1).long().contiguous()
        count, size = len(flat), self.embedding_dim
        if count:
            check(0 <= int(flat.min()) <= int(flat.max()) < self.num_embeddings, "known tokens")
        rows = torch.empty(count, size)
        compiled().quant_rows(
            self._type,
            pointer(self.numbers, torch.uint8, self.num_embeddings, self._line),
            size,
            pointer(flat, torch.long, count),
            count,
            pointer(rows, torch.float32, count, size),
        )
        found = rows.to(self.dtype)
        if self.embed_scale is not None:
            found = found * self.embed_scale
        return found.view(*tokens.shape, size)
