"""Keyed draws from many rows of scores at once.

Noise is computed only for tokens that may be drawn: on a CPU by a compiled function (``native/draw.c``),
elsewhere for a short list per row, the tokens that top-k, top-p and min-p may keep. The best of these is the
draw if it is certain to be kept; if rounding decides, the reference, ``noise.noisy_argmax``, draws that
row. So the tokens are exactly those of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from ctypes import CDLL
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import NoTokenLeft, SamplingParams
from outpace.draws.noise import host_noise, noise_of, noisy_argmax, token_words, words_of
from outpace.draws.sampling import TINY_TEMPERATURE, best_tokens, margin_of, warp
from outpace.native import draw
from outpace.native.draw import DrawStruct
from outpace.native.gpu import why_no_triton
from outpace.native.pointers import check, pointer
from outpace.transfer import gather, upload

# Returned for a row in which every token is excluded, or a logit is NaN.
NO_TOKEN = -1
_UNDECIDED = -2
_ALL = 1 << 40  # more tokens than any vocabulary has
# Lengths of the lists of best tokens that are tried on accelerators, in this order.
_SHORTLISTS = (64, 1024)
# Noise is between -3.7 and 36.8: a token whose score is 41 below the best one's is never drawn.
_NEVER = math.exp(-41)
# Rounding of a logarithm may swap two noisy scores that differ by less than this.
_CLOSE = 1e-9
# Without the compiled function, noise on the CPU is computed for this many (row, token) pairs at a time, so
# that they stay in its cache.
_CHUNK = 1 << 16


def sample(scores: Tensor, params: Seq[SamplingParams], words: Seq[int]) -> list[int]:
    """Keyed draws from rows of adjusted scores, float32 [n, vocabulary].

    Args:
        params: each row's temperature, top-k, top-p and min-p.
        words: the rows' keys.

    Returns:
        The tokens; ``NO_TOKEN`` for a row in which every token is excluded.
    """
    if scores.device.type == "cpu" and not isinstance(functions := draw.functions(), str):
        found = _draw_compiled(functions, scores, params, words)
    else:
        found = _draw_listed(scores, params, words)
    for place, token in enumerate(found):
        if token == _UNDECIDED:
            found[place] = _draw_alone(scores[place], params[place], words[place])
    return found


def draw_rows(scores: Tensor, words: Tensor, ids: Tensor | None = None) -> Tensor:
    """Keyed draws from rows of warped scores, [n, m], which stay on their device: places, [n].

    Those of ``noisy_argmax``; ``NO_TOKEN`` for a row in which every token is excluded, or a score is NaN.

    Args:
        words: the rows' keys, int64 [n].
        ids: the token of each score, [m]; None if it is the score's place.
    """
    known = token_words(scores.shape[-1], scores.device) if ids is None else words_of(ids)
    wide, noise = scores.double(), noise_of(known ^ words[:, None])
    peaks = wide.amax(dim=-1, keepdim=True)
    certain = torch.where(wide == peaks, noise, -torch.inf)  # an infinite score excludes all others
    noisy = torch.where(peaks == torch.inf, certain, wide + noise)
    return noisy.argmax(dim=-1).masked_fill(~(peaks[:, 0] > -torch.inf), NO_TOKEN)


def _draw_compiled(
    functions: CDLL, scores: Tensor, params: Seq[SamplingParams], words: Seq[int]
) -> list[int]:
    """Draws from rows of scores, float32 [n, vocabulary]; ``_UNDECIDED`` if rounding decides."""
    count, vocabulary = scores.shape
    check(len(params) == len(words) == count, f"parameters and a key for each of {count} rows")
    if any(own.temperature < TINY_TEMPERATURE for own in params):
        return [_UNDECIDED] * count
    margin, given = margin_of(vocabulary), scores.contiguous()
    draws = (DrawStruct * count)()
    for place, (own, word) in enumerate(zip(params, words, strict=True)):
        top_k, top_p, min_p = limits_of(own, vocabulary)
        draws[place] = DrawStruct(
            key=word,
            top_k=top_k,
            temperature=own.temperature,
            top_p=top_p,
            margin=margin,
            min_p=min_p,
        )
    known = token_words(vocabulary, scores.device)
    functions.draw_rows(
        count,
        vocabulary,
        pointer(given, torch.float32, count, vocabulary),
        pointer(known, torch.long, vocabulary),
        draws,
    )
    return [draw.token for draw in draws]


@cache
def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and not why_no_triton()


def is_cut(own: SamplingParams) -> bool:
    """True if top-k, top-p or min-p exclude tokens."""
    return own.top_k > 0 or own.top_p < 1 or own.min_p > 0


def keys_of(params: Seq[SamplingParams], words: Seq[int]) -> NDArray[np.int64]:
    """Per row its key, top-k, and the bits of its temperature, top-p and min-p in float64, [n, 5]."""
    numbers = np.empty((len(params), 5), np.int64)
    for row, own in enumerate(params):
        top_k, top_p, min_p = limits_of(own, _ALL)
        numbers[row, 2], numbers.view(np.float64)[row, [1, 3, 4]] = top_k, (own.temperature, top_p, min_p)
    numbers[:, 0] = host_keys(words)
    return numbers


def _draw_listed(scores: Tensor, params: Seq[SamplingParams], words: Seq[int]) -> list[int]:
    """Draws from rows of scores, float32 [n, vocabulary]; ``_UNDECIDED`` if no list decides."""
    found, cut = [_UNDECIDED] * len(params), [is_cut(own) for own in params]
    if has_kernels(scores.device) and all(own.temperature >= TINY_TEMPERATURE for own in params):
        return _draw_fused(scores, keys_of(params, words), any(cut))
    whole = [place for place in range(len(params)) if not cut[place]]
    scores = _heated(scores, params)
    step = max(1, _CHUNK // scores.shape[-1]) if scores.device.type == "cpu" else len(params)
    for start in range(0, len(whole), step):
        places = whole[start : start + step]
        put(found, places, _draw_whole(gather(scores, places), [words[place] for place in places]))
    for size in (None,) if scores.device.type == "cpu" else _SHORTLISTS:
        places = [place for place in range(len(params)) if cut[place] and found[place] == _UNDECIDED]
        if not places:
            break
        limits = _Limits.of([params[place] for place in places], scores.shape[-1])
        own_words = [words[place] for place in places]
        put(found, places, _draw_cut(gather(scores, places), own_words, limits, size))
    return found


def _draw_fused(scores: Tensor, keys: NDArray[np.int64], cut: bool) -> list[int]:
    """Draws from rows of scores, float32 [n, vocabulary], on a GPU; ``_UNDECIDED`` if rounding decides."""
    from outpace.draws.draw_kernel import draw

    tokens: list[int] = draw(scores, upload(keys, scores.device), cut=cut).tolist()
    return tokens


def _heated(scores: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Rows divided by their temperatures, as ``sampling.heat`` does."""
    temperatures = [own.temperature for own in params]
    tiny = [[own < TINY_TEMPERATURE] for own in temperatures]
    if any(own for (own,) in tiny):
        peaks = scores.amax(dim=-1, keepdim=True)
        scores = torch.where(upload(tiny, scores.device), scores - peaks, scores)
    if all(own == 1 for own in temperatures):
        return scores
    divisors = np.array([[max(own, 1e-30)] for own in temperatures], np.float32)
    return scores / upload(divisors, scores.device)


def _draw_alone(scores: Tensor, params: SamplingParams, word: int) -> int:
    try:
        return noisy_argmax(warp(scores, params), word)
    except NoTokenLeft:
        return NO_TOKEN  # an error only if a walk reaches this node


def host_keys(words: Seq[int]) -> NDArray[np.int64]:
    """The rows' keys as int64, shape [n]."""
    return np.array(words, np.uint64).view(np.int64)


def _draw_whole(scores: Tensor, words: Seq[int]) -> list[int]:
    """Draws from all tokens of rows of heated scores, float32 [n, vocabulary]."""
    device = scores.device
    noisy = (
        noise_of(token_words(scores.shape[-1], device) ^ upload(host_keys(words)[:, None], device)) + scores
    )
    # Rows with infinite or NaN scores are left to the reference.
    noisy.masked_fill_(~scores.amax(dim=-1, keepdim=True).isfinite(), -torch.inf)
    return [_UNDECIDED if token == NO_TOKEN else token for token in best_tokens(noisy)]


class _Limits(NamedTuple):
    """Top-k, top-p and min-p per row, each [n]; one that is off has a value without effect."""

    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]

    @classmethod
    def of(cls, params: Seq[SamplingParams], vocabulary: int) -> _Limits:
        top_k, top_p, min_p = zip(*(limits_of(own, vocabulary) for own in params), strict=True)
        return cls(np.array(top_k), np.array(top_p), np.array(min_p))


def limits_of(own: SamplingParams, vocabulary: int) -> tuple[int, float, float]:
    """Top-k, top-p and min-p; where one is off, a value without effect."""
    return (
        own.top_k if 0 < own.top_k < vocabulary else vocabulary,
        own.top_p if own.top_p < 1 else 2.0,
        own.min_p if own.min_p > 0 else -1.0,
    )


class _Lists(NamedTuple):
    """Candidate lists on the host, concatenated by row: every token that may be kept, and some others.

    Attributes:
        ends: row i has the indices ends[i] .. ends[i + 1] - 1; none if its list would be too short.
        ids: token ids, int64.
        values: heated scores, float64.
        weights: exp(score - the row's best score).
        totals: sum of the weights of all tokens that top-k keeps, [n].
    """

    ends: list[int]
    ids: NDArray[np.int64]
    values: NDArray[np.float64]
    weights: NDArray[np.float64]
    totals: NDArray[np.float64]


def _lists_by_weight(scores: Tensor, limits: _Limits) -> _Lists:
    """Lists on the CPU: omit the tokens whose weight is too small for them to be kept.

    Tokens that each have at most (1 - top-p) / vocabulary of the total weight have at most 1 - top-p of it
    together, so the others reach top-p.
    """
    array, (count, vocabulary) = scores.numpy(), scores.shape
    weights = np.exp(array - array.max(axis=1, keepdims=True))
    for row in np.flatnonzero(limits.top_k < vocabulary):
        place = vocabulary - int(limits.top_k[row])
        weights[row, array[row] < np.partition(array[row], place)[place]] = 0
    totals = weights.sum(axis=1).astype(np.float64)
    reach = (1 - limits.top_p - margin_of(vocabulary)) * totals / vocabulary
    least = np.maximum(np.maximum(reach, limits.min_p * (1 - 1e-5)), _NEVER)
    places = np.flatnonzero(weights > least[:, None])
    ends = np.searchsorted(places, np.arange(count + 1) * vocabulary).tolist()
    values, weights = array.ravel()[places].astype(np.float64), weights.ravel()[places].astype(np.float64)
    return _Lists(ends, places % vocabulary, values, weights, totals)


def _lists_of_best(scores: Tensor, limits: _Limits, size: int) -> _Lists:
    """Lists of the ``size`` best tokens, in one transfer; none for a row that may keep others too."""
    vocabulary = scores.shape[-1]
    size = min(size, vocabulary)
    best, ids = scores.topk(size)  # in descending order
    sums = (scores - best[:, :1]).exp_().sum(dim=1, keepdim=True)
    # Token ids and float32 numbers are exact in float64.
    lists = torch.cat([best.double(), ids.double(), sums.double()], dim=1).cpu().numpy()
    values, totals = lists[:, :size], lists[:, -1]
    top_k, top_p, min_p = limits
    weights = np.exp(values - values[:, :1])
    kth = np.take_along_axis(values, np.minimum(top_k, size)[:, None] - 1, axis=1)
    left = values >= kth  # including ties with the k-th
    totals = np.where(top_k < vocabulary, (weights * left).sum(axis=1), totals)
    # Whole if the last token is removed by top-k, or, with top-k off, by top-p or min-p.
    above = weights[:, :-1].sum(axis=1) > (top_p + margin_of(vocabulary)) * totals
    whole = ~left[:, -1] | ((top_k == vocabulary) & (above | (weights[:, -1] < min_p * (1 - 1e-5))))
    left &= whole[:, None] | (size == vocabulary)
    ends = [0, *left.sum(axis=1).cumsum().tolist()]
    return _Lists(ends, lists[:, size:-1][left].astype(np.int64), values[left], weights[left], totals)


def _draw_cut(scores: Tensor, words: Seq[int], limits: _Limits, size: int | None = None) -> list[int]:
    """Draws from the tokens that top-k, top-p and min-p keep of heated scores, float32 [n, vocabulary].

    Args:
        size: length of the lists; None for those by weight, on the CPU.

    Returns:
        The tokens; ``_UNDECIDED`` if rounding decides, a list is too short, or no score is finite.
    """
    vocabulary = scores.shape[-1]
    with np.errstate(invalid="ignore"):
        lists = _lists_by_weight(scores, limits) if size is None else _lists_of_best(scores, limits, size)
    ends, ids, values, weights, totals = lists
    keys = np.repeat(host_keys(words), np.diff(ends))
    noisy = values + host_noise(token_words(vocabulary, torch.device("cpu")).numpy()[ids] ^ keys)
    _, top_p, min_p = limits
    margin, found = margin_of(vocabulary), []
    for row, total in enumerate(totals.tolist()):
        own = slice(ends[row], ends[row + 1])
        bounds = (top_p[row] - margin) * total, (top_p[row] + margin) * total
        place = _winner(values[own], weights[own], noisy[own], bounds, float(min_p[row]))
        found.append(_UNDECIDED if place is None else int(ids[own][place]))
    return found


def _winner(
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
    noisy: NDArray[np.float64],
    top_p: tuple[float, float],
    min_p: float,
) -> int | None:
    """Index of the draw in a row's list: the best noisy score among the tokens that are kept.

    If the token with the best noisy score is certain to be kept, it is the draw. If it is certain to be
    removed, so is every token whose score is not higher, and the best of the others is tried.

    Args:
        noisy: values plus noise; overwritten.
        top_p: a token is certain to be kept if those before it weigh less than the first bound, and certain
            to be removed if they weigh more than the second.

    Returns:
        None if rounding decides, or the list is empty.
    """
    while len(noisy):
        best = int(noisy.argmax())
        top, value, weight = float(noisy[best]), values[best], float(weights[best])
        noisy[best] = -math.inf
        # The order of ties is up to the sort: all but the token itself may come before it.
        before = float(weights[values >= value].sum()) - weight
        if (before <= 0 or before < top_p[0]) and weight > min_p * (1 + 1e-5):
            return best if float(noisy.max()) < top - _CLOSE else None
        above = float(weights[values > value].sum())
        if not top > -math.inf or (above <= top_p[1] and weight >= min_p * (1 - 1e-5)):
            return None
        noisy[values <= value] = -math.inf
    return None


def put(found: list[int], places: Seq[int], tokens: Seq[int]) -> None:
    for place, token in zip(places, tokens, strict=True):
        found[place] = token
