"""Blocks of GGUF files in panels: their numbers are the file's, and a row's products its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.native.layers import functions
from outpace.targets.cpu.layouts import multiply
from outpace.targets.cpu.quants import TYPES, QuantEmbedding, QuantPart, Quants, row_bytes
from outpace.targets.cpu.trials import using_threads

gguf = pytest.importorskip("gguf", reason="needs outpace[gguf]")
from gguf_models import HALVES, random_blocks  # noqa: E402

pytestmark = pytest.mark.skipif(isinstance(functions(torch.float32), str), reason="nothing is compiled here")

ROWS, INPUTS = 37, 512  # no whole number of panels
FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": np.uint8}


@cache
def blocks(kind: str) -> NDArray[np.uint8]:
    """Random blocks, with scales of either sign, subnormal ones, and zeros."""
    found = random_blocks(kind, ROWS, INPUTS, seed=TYPES[kind])
    if kind in FLOATS:
        return found
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(TYPES[kind])][1]
    each = found.reshape(-1, size)
    each[::11] = 0
    for place in HALVES.get(kind, (0,)):
        each[3::11, place : place + 2] = (
            np.array([3e-8, -6e-6], np.float16).view(np.uint8).reshape(2, 2)[np.arange(len(each[3::11])) % 2]
        )
    if kind == "mxfp4":
        each[3::11, 0] = np.arange(len(each[3::11])) % 3
    return found


@cache
def numbers(kind: str) -> NDArray[np.float32]:
    """The numbers of these by the package gguf."""
    given: Any = blocks(kind).view(FLOATS.get(kind, np.uint8))
    found: NDArray[np.float32] = gguf.dequantize(given, gguf.GGMLQuantizationType(TYPES[kind]))
    return found.reshape(ROWS, INPUTS)


@cache
def part(kind: str) -> QuantPart:
    return QuantPart.pack(TYPES[kind], torch.from_numpy(blocks(kind)), INPUTS)


def bits(found: Any) -> NDArray[np.uint32]:
    return np.asarray(found, dtype=np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", TYPES)
def test_panels_hold_the_numbers_of_the_file(kind: str) -> None:
    assert np.array_equal(bits(part(kind).unpack()), bits(numbers(kind)))
    order = torch.from_numpy(np.random.default_rng(0).permutation(ROWS).astype(np.int32))
    moved = QuantPart.pack(TYPES[kind], torch.from_numpy(blocks(kind)), INPUTS, order)
    assert np.array_equal(bits(moved.unpack()), bits(numbers(kind)[order]))


@pytest.mark.parametrize("kind", TYPES)
def test_embeddings_are_looked_up_in_the_file(kind: str) -> None:
    plain = nn.Embedding(ROWS, INPUTS, device="meta")
    module = QuantEmbedding(plain, TYPES[kind], torch.from_numpy(blocks(kind)), torch.float32)
    tokens = torch.tensor([[3, 0, 36], [11, 3, 22]])
    assert np.array_equal(bits(module(tokens)), bits(numbers(kind)[tokens]))
    with pytest.raises(OutpaceError, match="known tokens"):
        module(torch.tensor([ROWS]))


def rounded(rows: Tensor) -> Tensor:
    """Rows in 8 bits by blocks of 32 numbers, in float64."""
    groups = rows.float().unflatten(-1, (-1, 32))
    scale = groups.abs().amax(dim=-1, keepdim=True) / 127
    return ((groups / scale).round() * scale).flatten(-2).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TYPES)
def test_products_are_those_of_rounded_rows(kind: str, dtype: torch.dtype) -> None:
    rows = torch.randn(11, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights, bias = Quants([part(kind), part("q4_0")], dtype), torch.randn(2 * ROWS).to(dtype)
    given = rows.double() if kind in FLOATS else rounded(rows)
    parts = [(given, numbers(kind)), (rounded(rows), numbers("q4_0"))]
    right = torch.cat([one @ torch.from_numpy(all_of).double().T for one, all_of in parts], dim=1) + bias
    found = multiply(rows, weights, bias)
    limit = 2e-3 if dtype == torch.float32 else 8e-3  # a tie may be rounded to the other number
    assert (found.double() - right).norm() < limit * right.norm()
    assert (found.double() - right).abs().max() < 4 * limit * right.abs().max()


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_the_same_bits_among_any_rows(kind: str) -> None:
    rows = torch.randn(19, INPUTS, generator=torch.Generator().manual_seed(2)).bfloat16()
    weights = Quants([part(kind)] * 3, torch.bfloat16)
    alone = torch.cat([multiply(row[None], weights, None) for row in rows])
    for count in (2, 3, 5, 7, 8, 19):
        assert torch.equal(torch.cat([multiply(some, weights, None) for some in rows.split(count)]), alone)
    with using_threads(2):
        assert torch.equal(multiply(rows, weights, None), alone)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(OutpaceError, match="whole blocks"):
        row_bytes(TYPES["q4_k"], 128)
    with pytest.raises(OutpaceError, match="whole blocks"):
        row_bytes(99, 256)
    with pytest.raises(OutpaceError, match="rows of the matrix"):
        QuantPart.pack(
            TYPES["q4_0"],
            torch.from_numpy(blocks("q4_0")),
            INPUTS,
            torch.full((ROWS,), ROWS, dtype=torch.int32),
        )
