"""Work that threads share: each part has the bits that it has alone, with any number of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core import SamplingParams
from outpace.draws import many_rows
from outpace.native import draw, layers
from outpace.native.pool import pool
from outpace.targets.cpu.compiled_attention import compiled_attention
from outpace.targets.cpu.kernels import COMPILED, Compiled, Int4, Int8
from outpace.targets.cpu.linear import CompiledNorm
from outpace.targets.cpu.trials import using_threads
from outpace.targets.inputs.context import ForwardContext
from outpace.targets.kernel import Kernel
from parts import described

pytestmark = pytest.mark.skipif(isinstance(pool(), str), reason="nothing is compiled here")
THREADS = pytest.mark.parametrize("threads", [1, 2, 5])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
CHUNK = 65536  # numbers of a chunk, as in pool.h


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@THREADS
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (Compiled(), torch.float32),
        (Compiled(), torch.bfloat16),
        *((one(), torch.bfloat16) for one in (Int8, Int4)),
    ],
    ids=described,
)
def test_products(kernel: Kernel, dtype: torch.dtype, rows: int, threads: int) -> None:
    inputs, outputs, part = 512, 1000, 64
    assert outputs * inputs > 5 * CHUNK > 5 * part * inputs
    given, weight, bias = (
        some(rows, inputs, dtype=dtype),
        some(outputs, inputs, dtype=dtype),
        some(outputs, dtype=dtype),
    )
    parts = [
        kernel.multiply(given, kernel.pack(weight[at : at + part]), bias[at : at + part])
        for at in range(0, outputs, part)
    ]
    with using_threads(threads):
        assert torch.equal(kernel.multiply(given, kernel.pack(weight), bias), torch.cat(parts, dim=1))


@THREADS
@DTYPES
def test_norms(dtype: torch.dtype, threads: int) -> None:
    rows = some(301, 2048, dtype=dtype)
    norm = CompiledNorm(torch.nn.Parameter(some(2048, dtype=dtype)), 1e-5)
    with using_threads(threads):
        assert torch.equal(norm(rows), torch.cat([norm(row) for row in rows.split(1)]))


@THREADS
@DTYPES
def test_attention(dtype: torch.dtype, threads: int) -> None:
    sequences, heads, shared, width, columns, size = 3, 8, 2, 25, 300, 64
    query, key, value = (
        some(sequences, count, length, size, dtype=dtype)
        for count, length in ((heads, width), (shared, columns), (shared, columns + 1))
    )
    value = value[:, :, :columns].contiguous()
    mask = torch.ones(sequences, 1, width, columns, dtype=torch.bool).tril(columns - width)
    work = sequences * heads * width * (columns - width) * size
    assert work > 4 * CHUNK > size * heads * columns
    alone = [
        one_row(
            query[at : at + 1, :, row : row + 1],
            key[at : at + 1],
            value[at : at + 1],
            mask[:1, :, row : row + 1],
        )
        for at in range(sequences)
        for row in range(width)
    ]
    with using_threads(threads), ForwardContext().running():
        found = compiled_attention(query, key, value, mask, 0.125)
    assert torch.equal(found.flatten(0, 1), torch.cat(alone).flatten(0, 1))


def one_row(*parts: Tensor) -> Tensor:
    with ForwardContext().running():
        return compiled_attention(*parts, 0.125)


@THREADS
@DTYPES
def test_the_best_logits(dtype: torch.dtype, threads: int) -> None:
    rows = some(33, 5000, dtype=dtype)
    alone = [torch.cat(parts) for parts in zip(*(layers.best(row, 3) for row in rows.split(1)), strict=True)]
    with using_threads(threads):
        assert all(map(torch.equal, layers.best(rows, 3), alone))


@THREADS
def test_draws(threads: int) -> None:
    functions: Any = draw.functions()
    rows, params = some(33, 5000), [SamplingParams(temperature=1.0, top_p=0.9, top_k=50)] * 33
    words = [7 * row for row in range(33)]
    alone = [
        many_rows._draw_compiled(functions, row, [own], [word])[0]
        for row, own, word in zip(rows.split(1), params, words, strict=True)
    ]
    with using_threads(threads):
        assert many_rows._draw_compiled(functions, rows, params, words) == alone


@DTYPES
def test_no_rows(dtype: torch.dtype) -> None:
    weight = some(64, 32, dtype=dtype)
    packed = COMPILED.pack(weight)
    assert COMPILED.multiply(weight[:0, :32], packed, None).shape == (0, 64)
