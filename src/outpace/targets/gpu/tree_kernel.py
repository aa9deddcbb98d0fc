"""Attention over committed columns and a tree, as Triton kernels.

The rows of the heads that share keys are packed into blocks, so no keys are copied. Columns are split into
stretches that run in parallel (split-KV, as in FlashDecoding); a second kernel merges their results by their
sums of exponentials. Lengths and trees are read on the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.targets.gpu.tiles import shared_bytes, tiles_for

_COLUMNS = 32  # columns per iteration, at most
_ROWS = 16  # minimum rows of a block
_PROGRAMS = 256  # number of programs that occupies a GPU; fewer blocks of rows get more stretches
_STRETCHES = 16  # maximum number of stretches


@triton.jit  # type: ignore[untyped-decorator]
def _stretch(
    Query, Key, Value, Mask, Acc, Top, Sum, scale, softcap,
    sqb, sqh, sqm, skb, skh, skn, svb, svh, svn,
    heads, width, columns, words,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attend from a block of rows to a stretch of columns: weighted values, top score, sum of exp."""
    bh, block, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // heads, bh % heads
    packed = block * BM + tl.arange(0, BM)
    real = packed < GROUPS * width
    head, row = h * GROUPS + packed // width, packed % width
    mask = Mask + (b * width + row) * (2 + words)
    base = tl.load(Mask + b * width * (2 + words))
    low = tl.load(mask + 1, mask=real, other=base)
    # From the first column that any row of the block attends to, to the tree's last; in whole tiles.
    first = tl.min(low, 0) // BN * BN
    last = tl.minimum(base + 64 * words, columns)
    step = tl.cdiv(tl.cdiv(last - first, tl.num_programs(2)), BN) * BN
    start = first + stretch * step
    stop = tl.minimum(start + step, last)
    dims, wide = tl.arange(0, BD), tl.arange(0, BV)
    at = Query + b * sqb + head[:, None] * sqh + row[:, None] * sqm + dims[None, :]
    query = tl.load(at, mask=real[:, None] & (dims < D)[None, :], other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    for column in range(start, stop, BN):
        cols = column + tl.arange(0, BN)
        there = cols < stop
        keys = Key + b * skb + h * skh + cols[:, None] * skn + dims[None, :]
        key = tl.load(keys, mask=there[:, None] & (dims < D)[None, :], other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if CAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        node = cols - base
        inside = real[:, None] & (there & (node >= 0))[None, :]
        word = tl.load(mask[:, None] + 2 + (node // 64)[None, :], mask=inside, other=0)
        bit = (word >> (node % 64)[None, :]) & 1
        seen = (cols[None, :] >= low[:, None]) & (node < 0)[None, :] & real[:, None]
        seen = there[None, :] & (seen | (inside & (bit == 1)))
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
        fade = tl.exp(top - higher)
        values = Value + b * svb + h * svh + cols[:, None] * svn + wide[None, :]
        value = tl.load(values, mask=there[:, None] & (wide < DV)[None, :], other=0.0).to(query.dtype)
        own = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        acc = acc * fade[:, None] + own
        total = total * fade + tl.sum(weights, 1)
        top = higher
    place = ((bh * tl.num_programs(2) + stretch) * tl.num_programs(1) + block) * BM + tl.arange(0, BM)
    tl.store(Acc + place[:, None] * BV + wide[None, :], acc)
    tl.store(Top + place, top)
    tl.store(Sum + place, total)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    Acc, Top, Sum, Sinks, Out, heads, width,
    DV: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, STRETCHES: tl.constexpr,
    GROUPS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the stretches of a block of rows; a row that attends to no column becomes zeros."""
    bh, block = tl.program_id(0), tl.program_id(1)
    b, h = bh // heads, bh % heads
    own, wide = tl.arange(0, BM), tl.arange(0, BV)
    packed = block * BM + own
    real = packed < GROUPS * width
    head, row = h * GROUPS + packed // width, packed % width
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if SINKS:
        top = tl.load(Sinks + head, mask=real, other=0.0).to(tl.float32)
        total += 1.0
    acc = tl.zeros((BM, BV), tl.float32)
    for stretch in range(STRETCHES):
        place = ((bh * STRETCHES + stretch) * tl.num_programs(1) + block) * BM + own
        other = tl.load(Top + place)
        higher = tl.maximum(top, other)
        fade, weight = tl.exp(top - higher), tl.exp(other - higher)
        acc = acc * fade[:, None] + weight[:, None] * tl.load(Acc + place[:, None] * BV + wide[None, :])
        total = total * fade + weight * tl.load(Sum + place)
        top = higher
    result = acc / tl.maximum(total, 1e-30)[:, None]
    at = Out + ((b * width + row) * heads * GROUPS + head)[:, None] * DV + wide[None, :]
    tl.store(at, result.to(Out.dtype.element_ty), mask=real[:, None] & (wide < DV)[None, :])


def device_of(rows: Tensor) -> torch.cuda.device:
    """Context in which kernels run on the rows' device; Triton takes the current one, whatever their rows."""
    return torch.cuda.device(rows.get_device())  # -1, which changes nothing, on a CPU


def multiplies_bits(rows: Tensor) -> bool:
    """True in Triton's interpreter, on a CPU, which multiplies the bits of bfloat16 as integers."""
    return rows.device.type == "cpu"


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute ``tree_attention.reference`` in float16, bfloat16 or float32; ``mask`` is compact."""
    batch, heads, width, size = query.shape
    kv, columns, wide = key.shape[1], key.shape[2], value.shape[3]
    groups = heads // kv
    query, key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (query, key, value))
    deep, padded = (max(16, triton.next_power_of_2(each)) for each in (size, wide))
    most_rows = max(triton.next_power_of_2(groups * width), _ROWS)
    tiles = tiles_for(most_rows, deep, padded, query.itemsize, shared_bytes(query.device))
    rows = tiles.rows
    blocks = triton.cdiv(groups * width, rows)
    most = min(_STRETCHES, triton.cdiv(columns, 4 * _COLUMNS))
    stretches = max(1, min(most, _PROGRAMS // (batch * kv * blocks)))
    places = batch * kv * stretches * blocks * rows
    like: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    acc, top, total = torch.empty((places, padded), **like), *torch.empty((2, places), **like)
    out = torch.empty((batch, width, heads, wide), dtype=query.dtype, device=query.device)
    with device_of(query):
        _stretch[(batch * kv, blocks, stretches)](
            query, key, value, mask.contiguous(), acc, top, total, scale, softcap or 0.0,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            kv, width, columns, mask.shape[3] - 2,
            D=size, BD=deep, DV=wide, BV=padded,
            BM=rows, BN=tiles.columns, GROUPS=groups, CAP=softcap is not None, WIDE=multiplies_bits(query),
            num_stages=tiles.stages,
        )  # fmt: skip
        _merge[(batch * kv, blocks)](
            acc, top, total, acc if sinks is None else sinks, out, kv, width,
            DV=wide, BV=padded, BM=rows, STRETCHES=stretches, GROUPS=groups, SINKS=sinks is not None,
        )  # fmt: skip
    return out
