"""Temperature, top-k, top-p, min-p and keyed noise on rows that stay on their device, as their parameters.

For drafts, which need not be exact: rounding may decide otherwise than in ``sampling``, the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outpace.draws.noise import noise_of, token_words, words_of
from outpace.draws.sampling import TINY_TEMPERATURE


class Warps(NamedTuple):
    """Parameters of n rows, each [n]; one that is off has a value without effect.

    Attributes:
        temperature, top_p, min_p: float64.
        top_k: int64.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def spread(self, count: int) -> Warps:
        """Those of ``count`` rows in place of each."""
        return Warps(*(each[:, None].expand(-1, count).reshape(-1) for each in self))


def warped(scores: Tensor, warps: Warps, cut: bool) -> Tensor:
    """``sampling.warp`` of rows of scores, [n, size], in float32.

    Args:
        cut: whether top-k, top-p or min-p of some row has an effect.
    """
    temperature, scores = warps.temperature[:, None], scores.float()
    lower = scores - scores.amax(dim=-1, keepdim=True)
    scores = torch.where(temperature < TINY_TEMPERATURE, lower, scores) / temperature.clamp(min=1e-30).float()
    return _truncated(scores, warps) if cut else scores


def _truncated(scores: Tensor, warps: Warps) -> Tensor:
    size = scores.shape[-1]
    ordered, order = scores.sort(dim=-1)
    least = ordered.gather(-1, size - warps.top_k.clamp(max=size)[:, None])
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    outside = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - warps.top_p)[:, None].float()
    outside[:, -1] = False
    ordered = ordered.masked_fill(outside, -torch.inf)
    chances = ordered.softmax(dim=-1)
    least = warps.min_p[:, None].float() * chances.amax(dim=-1, keepdim=True)
    return torch.empty_like(scores).scatter_(-1, order, ordered.masked_fill(chances < least, -torch.inf))


def noisy(scores: Tensor, words: Tensor, ids: Tensor | None) -> Tensor:
    """Warped scores plus the Gumbel noise of each row's key, float64 [n, size].

    Args:
        words: the rows' keys, int64 [n].
        ids: the token of each score, [size]; None if it is the score's place.
    """
    known = token_words(scores.shape[-1], scores.device) if ids is None else words_of(ids)
    return scores.double() + noise_of(known ^ words[:, None])


def keys_on_device(words: Tensor, warps: Warps) -> Tensor:
    """The numbers of ``many_rows.keys_of`` from those on a device.

    Args:
        words: the rows' keys, int64 [n].
    """
    temperature, top_p, min_p = (each.view(torch.int64) for each in (warps.temperature, *warps[2:]))
    return torch.stack([words, temperature, warps.top_k, top_p, min_p], dim=1)
