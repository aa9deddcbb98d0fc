"""Keyed draws from rows of scores, as Triton kernels: temperature, cuts, noise of a hash, and the best token.

Where top-k, top-p or min-p remove tokens, a first kernel finds two scores of each row: tokens below the lower
one are certainly removed, those from the higher one on are certainly kept. The next finds the best noisy
score of each block of a row, the last the best of a row's blocks. The logarithms of a GPU may differ from the
reference's in the last bit, so a draw is certain only if the second best score is lower by more than that.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.draws.noise import MULTIPLIERS, WEYL, signed
from outpace.draws.sampling import margin_of

_BLOCK = 1024
_FIRST, _SECOND = (tl.constexpr(signed(multiplier)) for multiplier in MULTIPLIERS)
_WEYL = tl.constexpr(signed(WEYL))
_CLOSE = tl.constexpr(1e-9)
_WORDS = tl.constexpr(5)  # numbers of a row in ``keys``
_LEAST = tl.constexpr(-2139095041)  # ``_ordered`` of minus infinity
_NEAR = tl.constexpr(2e-5)  # what rounding adds to a logarithm, at most
_WIDE, _WAYS = 512, 16  # of ``_cuts``


@triton.jit
def _mixed(words):  # type: ignore[no-untyped-def]
    """``noise.mix``; the masks turn arithmetic shifts into logical ones."""
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * _FIRST
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


@triton.jit
def _ordered(bits):  # type: ignore[no-untyped-def]
    """Bits of float32 numbers as int32 in the order of the numbers, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _heated(Scores, Keys, size, stride, place):  # type: ignore[no-untyped-def]
    """Scores of a row at some places, divided by its temperature; minus infinity beyond its end."""
    row = tl.program_id(0)
    temperature = tl.load(Keys + _WORDS * row + 1).to(tl.float64, bitcast=True).to(tl.float32)
    low = float("-inf")
    score = tl.load(Scores + row.to(tl.int64) * stride + place, mask=place < size, other=low)
    return tl.where(place < size, tl.div_rn(score.to(tl.float32), temperature), low)


@triton.jit  # type: ignore[untyped-decorator]
def _from(Scores, Keys, size, stride, least, peak, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of a row's scores from each of some on, and the sum of their exp(score - peak)."""
    inside = tl.arange(0, BLOCK)
    count, weight = (least * 0).to(tl.int32), (least * 0).to(tl.float64)
    for start in range(0, size, BLOCK):
        score = _heated(Scores, Keys, size, stride, start + inside)
        over = (_ordered(score.to(tl.int32, bitcast=True))[None, :] >= least) & (start + inside < size)[
            None, :
        ]
        weights = tl.exp(score - peak).to(tl.float64)[None, :]
        count += tl.sum(over.to(tl.int32), 1, keep_dims=True)
        weight += tl.sum(tl.where(over, weights, 0.0), 1, keep_dims=True)
    return count, weight


@triton.jit
def _narrowed(under, over, tried, found):  # type: ignore[no-untyped-def]
    """The bounds of a search after some places were tried, [n, 1], of which the later ones are found."""
    return tl.max(tl.where(found, under, tried), None), tl.min(tl.where(found, tried, over), None)


@triton.jit  # type: ignore[untyped-decorator]
def _cuts(  # type: ignore[no-untyped-def]
    Scores, Keys, Low, High, size, stride, margin, BLOCK: tl.constexpr, WAYS: tl.constexpr
):  # fmt: skip
    """The scores of a row below which a token is certainly removed, and from which on it is certainly kept.

    They are searched among the bits of float32 numbers, ``WAYS`` numbers at a time: ``over`` is one that is
    found to be large enough, ``under`` one that is not.
    """
    row, inside, way = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(1, WAYS + 1)[:, None].to(tl.int64)
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        peaks = tl.maximum(peaks, _heated(Scores, Keys, size, stride, start + inside))
    peak = tl.max(peaks, 0)
    top_k = tl.load(Keys + _WORDS * row + 2)
    top_p = tl.load(Keys + _WORDS * row + 3).to(tl.float64, bitcast=True)
    min_p = tl.load(Keys + _WORDS * row + 4).to(tl.float64, bitcast=True)
    most = _ordered(peak.to(tl.int32, bitcast=True)).to(tl.int64)
    kth = tl.full((), _LEAST, tl.int64)
    if top_k < size:  # find the top_k-th highest score
        over = most + 1
        while kth + 1 < over:
            tried = tl.minimum(kth + way * ((over - kth + WAYS) // (WAYS + 1)), over)
            count, _ = _from(Scores, Keys, size, stride, tried, peak, BLOCK)
            kth, over = _narrowed(kth, over, tried, count < top_k)
    low, high = kth, kth
    if top_p < 1:
        _, all_ = _from(Scores, Keys, size, stride, way * 0 + kth, peak, BLOCK)
        total = tl.max(all_, None)
        under, low = kth - 1, most
        while under + 1 < low:
            tried = tl.minimum(under + way * ((low - under + WAYS) // (WAYS + 1)), low)
            _, before = _from(Scores, Keys, size, stride, tried + 1, peak, BLOCK)
            under, low = _narrowed(under, low, tried, before <= (top_p + margin) * total)
        under, high = kth - 1, most + 1
        while under + 1 < high:
            tried = tl.minimum(under + way * ((high - under + WAYS) // (WAYS + 1)), high)
            own = tl.exp(_ordered(tried.to(tl.int32)).to(tl.float32, bitcast=True) - peak)
            _, before = _from(Scores, Keys, size, stride, tried, peak, BLOCK)
            before -= own.to(tl.float64)
            kept = (tried > most) | (before <= 0) | (before < (top_p - margin) * total)
            under, high = _narrowed(under, high, tried, kept)
    lowest = _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)
    highest = tl.where(high > most, float("inf"), _ordered(high.to(tl.int32)).to(tl.float32, bitcast=True))
    if min_p > 0:
        share = tl.log(min_p).to(tl.float32)
        lowest = tl.maximum(lowest, peak + share - _NEAR)
        highest = tl.maximum(highest, peak + share + _NEAR)
    tl.store(Low + row, lowest)
    tl.store(High + row, highest)


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(  # type: ignore[no-untyped-def]
    Scores, Keys, Ids, Low, Best, Second, Peak, Score, Token, size, stride,
    BLOCK: tl.constexpr, IDS: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    """The two best noisy scores of a block, the place and score of the best, and the highest score."""
    row, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    score = _heated(Scores, Keys, size, stride, place)
    word = tl.load(Keys + _WORDS * row)
    token = tl.load(Ids + place, mask=real, other=0) if IDS else place.to(tl.int64)
    bits = (_mixed(_mixed((token + 1) * _WEYL) ^ word) >> 12) & 0xFFFFFFFFFFFFF
    noise = -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))
    drawn = real & (score >= tl.load(Low + row)) if CUT else real
    noisy = tl.where(drawn, score.to(tl.float64) + noise, float("-inf"))
    best, at = tl.max(noisy, 0, return_indices=True)
    to = row * tl.num_programs(1) + block
    tl.store(Best + to, best)
    tl.store(Second + to, tl.max(tl.where(tl.arange(0, BLOCK) == at, float("-inf"), noisy), 0))
    odd = tl.max((score != score).to(tl.int32), 0)
    tl.store(Peak + to, tl.where(odd > 0, float("inf"), tl.max(score, 0)))
    tl.store(Token + to, block * BLOCK + at)
    if CUT:
        tl.store(Score + to, tl.max(tl.where(tl.arange(0, BLOCK) == at, score, float("-inf")), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    Best, Second, Peak, Score, Token, High, Out, blocks,
    BLOCKS: tl.constexpr, SURE: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
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
    if SURE and CUT:
        score = tl.max(tl.where(block == first, tl.load(Score + at, mask=real, other=low), low), 0)
        decided = decided & (score >= tl.load(High + row))
    token = tl.max(tl.where(block == first, tl.load(Token + at, mask=real, other=0), 0), 0)
    tl.store(Out + row, tl.where(decided, token, -2).to(tl.int64))


def draw(
    scores: Tensor, keys: Tensor, ids: Tensor | None = None, sure: bool = True, cut: bool = False
) -> Tensor:
    """Places of the draws from rows of scores, [n, size], on their device: int64 [n]; -2 if undecided.

    Args:
        keys: the rows' numbers by ``many_rows.keys_of``, int64 [n, 5].
        ids: the token of each score, [size]; None if it is the score's place.
        sure: leave a draw undecided if rounding decides it.
        cut: whether top-k, top-p or min-p of some row has an effect.
    """
    count, size = scores.shape
    blocks = triton.cdiv(size, _BLOCK)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    keys, device = keys.contiguous(), scores.device
    best, second = torch.empty((2, count, blocks), dtype=torch.float64, device=device)
    peak, score = torch.empty((2, count, blocks), dtype=torch.float32, device=device)
    low, high = torch.empty((2, count), dtype=torch.float32, device=device)
    token = torch.empty((count, blocks), dtype=torch.int32, device=device)
    out = torch.empty(count, dtype=torch.int64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if cut:
            wide = min(_WIDE, triton.next_power_of_2(size))
            _cuts[(count,)](
                scores, keys, low, high, size, scores.stride(0), margin_of(size), BLOCK=wide, WAYS=_WAYS
            )
        _blocks[(count, blocks)](
            scores, keys, keys if ids is None else ids, low if sure else high,
            best, second, peak, score, token, size, scores.stride(0),
            BLOCK=_BLOCK, IDS=ids is not None, CUT=cut,
        )  # fmt: skip
        _choose[(count,)](
            best, second, peak, score, token, high, out, blocks,
            BLOCKS=triton.next_power_of_2(blocks), SURE=sure, CUT=cut,
        )  # fmt: skip
    return out
