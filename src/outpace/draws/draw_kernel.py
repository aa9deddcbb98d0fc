"""Keyed draws from whole rows of scores, as Triton kernels: temperature, noise of a hash, and the best token.

The first kernel finds the best noisy score of each block of a row, the second the best of a row's blocks. The
logarithms of a GPU may differ from the reference's in the last bit, so a draw is certain only if the
second best score is lower by more than that.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.draws.noise import MULTIPLIERS, WEYL, signed

_BLOCK = 1024
_FIRST, _SECOND = (tl.constexpr(signed(multiplier)) for multiplier in MULTIPLIERS)
_WEYL = tl.constexpr(signed(WEYL))
_CLOSE = tl.constexpr(1e-9)


@triton.jit
def _mixed(words):  # type: ignore[no-untyped-def]
    """``noise.mix``; the masks turn arithmetic shifts into logical ones."""
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * _FIRST
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(  # type: ignore[no-untyped-def]
    Scores, Keys, Ids, Best, Second, Peak, Token, size, stride, BLOCK: tl.constexpr, IDS: tl.constexpr
):  # fmt: skip
    """The two best noisy scores of a block of a row, the place of the best, and the highest score."""
    row, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    score = tl.load(Scores + row.to(tl.int64) * stride + place, mask=real, other=float("-inf")).to(tl.float32)
    word = tl.load(Keys + 2 * row)
    temperature = tl.load(Keys + 2 * row + 1).to(tl.float64, bitcast=True).to(tl.float32)
    token = tl.load(Ids + place, mask=real, other=0) if IDS else place.to(tl.int64)
    bits = (_mixed(_mixed((token + 1) * _WEYL) ^ word) >> 12) & 0xFFFFFFFFFFFFF
    noise = -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))
    noisy = tl.where(real, tl.div_rn(score, temperature).to(tl.float64) + noise, float("-inf"))
    best, at = tl.max(noisy, 0, return_indices=True)
    to = row * tl.num_programs(1) + block
    tl.store(Best + to, best)
    tl.store(Second + to, tl.max(tl.where(tl.arange(0, BLOCK) == at, float("-inf"), noisy), 0))
    odd = tl.max((score != score).to(tl.int32), 0)
    tl.store(Peak + to, tl.where(odd > 0, float("inf"), tl.max(score, 0)))
    tl.store(Token + to, block * BLOCK + at)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(Best, Second, Peak, Token, Out, blocks, BLOCKS: tl.constexpr, SURE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of a row's draw; -2 if a score is infinite or NaN, or if it must be sure and is not."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    real = block < blocks
    at = row * blocks + block
    low = float("-inf")
    every = tl.load(Best + at, mask=real, other=low)
    best, first = tl.max(every, 0, return_indices=True)
    second = tl.maximum(
        tl.max(tl.where(block == first, low, every), 0),
        tl.max(tl.where(block == first, tl.load(Second + at, mask=real, other=low), low), 0),
    )
    peak = tl.max(tl.load(Peak + at, mask=real, other=low), 0)
    decided = (peak > low) & (peak < float("inf"))
    if SURE:
        decided = decided & (second < best - _CLOSE)
    token = tl.max(tl.where(block == first, tl.load(Token + at, mask=real, other=0), 0), 0)
    tl.store(Out + row, tl.where(decided, token, -2).to(tl.int64))


def draw(scores: Tensor, keys: Tensor, ids: Tensor | None = None, sure: bool = True) -> Tensor:
    """Places of the draws from rows of scores, [n, size], on their device: int64 [n]; -2 if undecided.

    Args:
        keys: per row its key, and the bits of its temperature in float64, int64 [n, 2].
        ids: the token of each score, [size]; None if it is the score's place.
        sure: leave a draw undecided if rounding decides it.
    """
    count, size = scores.shape
    blocks = triton.cdiv(size, _BLOCK)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    device = scores.device
    best, second = torch.empty((2, count, blocks), dtype=torch.float64, device=device)
    peak = torch.empty((count, blocks), dtype=torch.float32, device=device)
    token = torch.empty((count, blocks), dtype=torch.int32, device=device)
    out = torch.empty(count, dtype=torch.int64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _blocks[(count, blocks)](
            scores, keys, keys if ids is None else ids, best, second, peak, token, size, scores.stride(0),
            BLOCK=_BLOCK, IDS=ids is not None,
        )  # fmt: skip
        _choose[(count,)](
            best, second, peak, token, out, blocks, BLOCKS=triton.next_power_of_2(blocks), SURE=sure
        )
    return out
