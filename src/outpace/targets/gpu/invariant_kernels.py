"""Triton kernels that give a row the same bits among any other rows: linear layers, norms, attention.

Tiles and the order of sums depend on the model alone, never on the number of rows, sequences or columns. So
neither a tile nor a split is chosen by the shape of a forward, as libraries do it, nor tuned for it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.targets.gpu.tiles import Tiles, shared_bytes
from outpace.targets.gpu.tree_kernel import device_of, multiplies_bits

_ROWS = 16  # rows of a tile: the fewest that tensor cores multiply
_OUTPUTS = 32
_INPUTS = 128
_POSITIONS = 32
_SPLIT = 512  # positions of a stretch, a multiple of those of a tile
# Whether a product and a sum may round once: the compiler would choose by how a kernel is specialised, and a
# row's bits would follow. Triton's default differs by version.
_FUSES = False
_LAUNCHED = 128  # rows of a sequence in one launch, which limits the memory for stretches


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _linear(
    Rows, Weight, Bias, Out, count, outputs, inputs, stride_row, stride_output,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    output = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, inputs, BK):
        column = start + tl.arange(0, BK)
        there = (column < inputs)[None, :]
        rows = tl.load(
            Rows + row[:, None] * stride_row + column[None, :], mask=(row < count)[:, None] & there, other=0.0
        )
        at = Weight + output[:, None] * stride_output + column[None, :]
        weight = tl.load(at, mask=(output < outputs)[:, None] & there, other=0.0)
        if WIDE:
            rows, weight = rows.to(tl.float32), weight.to(tl.float32)
        acc += tl.dot(rows, tl.trans(weight), input_precision="ieee")
    if BIAS:
        acc += tl.load(Bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    at = Out + row[:, None] * outputs + output[None, :]
    tl.store(at, acc.to(Out.dtype.element_ty), mask=(row < count)[:, None] & (output < outputs)[None, :])


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows [n, inputs] by a weight [outputs, inputs]; sums over inputs run in their order."""
    rows, weight = (part if part.stride(1) == 1 else part.contiguous() for part in (rows, weight))
    out = rows.new_empty((len(rows), len(weight)))
    grid = triton.cdiv(len(rows), _ROWS), triton.cdiv(len(weight), _OUTPUTS)
    stage = (_ROWS + _OUTPUTS) * _INPUTS * rows.itemsize
    with device_of(rows):
        _linear[grid](
            rows, weight, weight if bias is None else bias, out, len(rows), *weight.shape,
            rows.stride(0), weight.stride(0),
            BM=_ROWS, BN=_OUTPUTS, BK=_INPUTS, BIAS=bias is not None, WIDE=multiplies_bits(rows),
            num_stages=max(1, min(3, shared_bytes(rows.device) // stage)), enable_fp_fusion=_FUSES,
        )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _norm(
    Rows, Weight, Out, size, epsilon, stride_row,
    BLOCK: tl.constexpr, ONE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < size
    states = tl.load(Rows + row * stride_row + column, mask=there, other=0.0).to(tl.float32)
    states *= tl.rsqrt(tl.sum(states * states, 0) / size + epsilon)
    if ROUND:
        states = states.to(Out.dtype.element_ty).to(tl.float32)
    weight = tl.load(Weight + column, mask=there, other=0.0).to(tl.float32)
    if ONE:
        weight += 1.0
    tl.store(Out + row * size + column, (weight * states).to(Out.dtype.element_ty), mask=there)


def norm(states: Tensor, weight: Tensor, epsilon: float, adds_one: bool, rounds: bool) -> Tensor:
    """Divide rows [..., size] by their root mean square, and multiply them by a weight.

    Args:
        adds_one: 1 is added to the weight.
        rounds: rows are rounded to their dtype before they are multiplied.
    """
    size = states.shape[-1]
    rows = states.reshape(-1, size)
    # The compiler lays rows out over threads by their alignment, and the threads decide the order of the sum.
    # A single row may have any stride.
    if rows.stride() != (size, 1) or rows.storage_offset() * rows.element_size() % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    out = rows.new_empty(rows.shape)
    with device_of(rows):
        _norm[(len(rows),)](
            rows, weight, out, size, epsilon, rows.stride(0),
            BLOCK=triton.next_power_of_2(size), ONE=adds_one, ROUND=rounds, enable_fp_fusion=_FUSES,
        )  # fmt: skip
    return out.view(states.shape)


@triton.jit
def _columns(Head, column, stride, there, dims, size):
    """Load columns of a head of keys or values; zeros where there is none."""
    at = Head + column[:, None] * stride + dims[None, :]
    return tl.load(at, mask=there[:, None] & (dims < size)[None, :], other=0.0)


@triton.jit(do_not_specialize=["width", "fields"])  # type: ignore[untyped-decorator]
def _stretch(
    Query, Key, Value, Paths, Acc, Top, Sum, scale, softcap,
    sqb, sqh, sqm, skb, skh, skn, svb, svh, svn, heads, width, fields,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attend from a block of rows to a stretch of positions: weighted values, top score, sum of exp."""
    bh, block, stretch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // heads).to(tl.int64), bh % heads
    packed = block * BM + tl.arange(0, BM)
    real = packed < GROUPS * width
    row, head = packed // GROUPS, h * GROUPS + packed % GROUPS
    paths = Paths + b * width * fields
    at = paths + row * fields
    low = tl.load(at, mask=real, other=0)
    whole = tl.load(at + 2, mask=real, other=0)
    end = tl.load(at + 3, mask=real, other=0)
    dims, wide = tl.arange(0, BD), tl.arange(0, BV)
    at = Query + b * sqb + head[:, None] * sqh + row[:, None] * sqm + dims[None, :]
    query = tl.load(at, mask=real[:, None] & (dims < D)[None, :], other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    token = block * BM // GROUPS
    tokens = tl.minimum(tl.cdiv(block * BM + BM, GROUPS), width) - token
    last = tl.max(end, 0)
    first = tl.min(tl.where(end > low, low, last), 0) // BN * BN
    start = tl.maximum(stretch * SPLIT, first)
    for position in range(start, tl.minimum(stretch * SPLIT + SPLIT, last), BN):
        place = position + tl.arange(0, BN)
        # Rows share a tile if all have its positions in the columns of the same number. Otherwise each has
        # a turn with its own columns, which adds zeros to the others. Both run the same instructions.
        off = (whole < tl.minimum(end, position + BN)) & (end > position)
        apart = tl.max(off.to(tl.int32), 0) > 0
        for turn in range(0, tl.where(apart, tokens, 1)):
            own = paths + (token + turn) * fields
            base = tl.load(own + 1)
            listed = (place >= base) & (place < tl.where(apart, tl.load(own + 3), 0))
            column = tl.where(listed, tl.load(own + 4 + (place - base), mask=listed, other=0), place)
            there = place < last
            key = _columns(Key + b * skb + h * skh, column, skn, there, dims, D).to(query.dtype)
            value = _columns(Value + b * svb + h * svh, column, svn, there, wide, DV).to(query.dtype)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if CAP:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
            seen = (place[None, :] >= low[:, None]) & (place[None, :] < end[:, None])
            seen = seen & ((row == token + turn)[:, None] | (apart == 0))
            scores = tl.where(seen, scores, -1e30)
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
            fade = tl.exp(top - higher)
            acc = acc * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            total = total * fade + tl.sum(weights, 1)
            top = higher
    place = (bh * tl.num_programs(2) + stretch).to(tl.int64) * tl.num_programs(1) + block
    place = place * BM + tl.arange(0, BM)
    tl.store(Acc + place[:, None] * BV + wide[None, :], acc)
    tl.store(Top + place, top)
    tl.store(Sum + place, total)


@triton.jit(do_not_specialize=["width", "stretches"])  # type: ignore[untyped-decorator]
def _merge(
    Acc, Top, Sum, Sinks, Out, heads, width, stretches,
    DV: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, GROUPS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the stretches of a block of rows in their order; those without a seen position add zeros."""
    bh, block = tl.program_id(0), tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), bh % heads
    packed = block * BM + tl.arange(0, BM)
    real = packed < GROUPS * width
    row, head = packed // GROUPS, h * GROUPS + packed % GROUPS
    wide = tl.arange(0, BV)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if SINKS:
        top = tl.load(Sinks + head, mask=real, other=0.0).to(tl.float32)
        total += 1.0
    acc = tl.zeros((BM, BV), tl.float32)
    for stretch in range(0, stretches):
        place = ((bh * stretches + stretch) * tl.num_programs(1) + block).to(tl.int64) * BM
        place += tl.arange(0, BM)
        other = tl.load(Top + place)
        higher = tl.maximum(top, other)
        fade, weight = tl.exp(top - higher), tl.exp(other - higher)
        acc = acc * fade[:, None] + weight[:, None] * tl.load(Acc + place[:, None] * BV + wide[None, :])
        total = total * fade + weight * tl.load(Sum + place)
        top = higher
    result = acc / tl.maximum(total, 1e-30)[:, None]
    at = Out + ((b * width + row) * heads * GROUPS + head)[:, None] * DV + wide[None, :]
    tl.store(at, result.to(Out.dtype.element_ty), mask=real[:, None] & (wide < DV)[None, :])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paths: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute ``tree_attention.reference``; ``paths`` is a mask of ``device_rows.in_order``.

    A row's sums run over the positions of its own text in their order, in tiles and stretches that begin at
    multiples of fixed numbers, whatever the columns that hold them.
    """
    width = query.shape[2]
    if width > _LAUNCHED:
        parts = zip(query.split(_LAUNCHED, dim=2), paths.split(_LAUNCHED, dim=2), strict=True)
        found = [attend(some, key, value, own, scale, softcap, sinks) for some, own in parts]
        return torch.cat(found, dim=1)
    batch, heads, _, size = query.shape
    kv, columns, wide = key.shape[1], key.shape[2], value.shape[3]
    groups = heads // kv
    query, key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (query, key, value))
    paths = paths.expand(batch, -1, -1, -1).contiguous()
    blocks, stretches = triton.cdiv(groups * width, _ROWS), triton.cdiv(columns, _SPLIT)
    partial = batch * kv * stretches * blocks * _ROWS
    deep, padded = (max(16, triton.next_power_of_2(each)) for each in (size, wide))
    item, shared = query.itemsize, shared_bytes(query.device)
    stages = next((n for n in (3, 2) if Tiles(_ROWS, _POSITIONS, n).shared(deep, padded, item) <= shared), 1)
    like: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    acc, top, total = torch.empty((partial, padded), **like), *torch.empty((2, partial), **like)
    out = torch.empty((batch, width, heads, wide), dtype=query.dtype, device=query.device)
    with device_of(query):
        _stretch[(batch * kv, blocks, stretches)](
            query, key, value, paths, acc, top, total, scale, softcap or 0.0,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], kv, width, paths.shape[3],
            D=size, BD=deep, DV=wide, BV=padded, BM=_ROWS, BN=_POSITIONS,
            SPLIT=_SPLIT, GROUPS=groups, CAP=softcap is not None, WIDE=multiplies_bits(query),
            num_stages=stages, enable_fp_fusion=_FUSES,
        )  # fmt: skip
        _merge[(batch * kv, blocks)](
            acc, top, total, acc if sinks is None else sinks, out, kv, width, stretches,
            DV=wide, BV=padded, BM=_ROWS, GROUPS=groups, SINKS=sinks is not None, enable_fp_fusion=_FUSES,
        )  # fmt: skip
    return out
