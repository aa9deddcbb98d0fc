"""Keyed noise, and the draws with it.

The noise is a function of (seed, stream, output index or node, token id) and of nothing else: an integer
hash, the same on every device. The target's own draw at an output index is the argmax of the processed
logits plus that index's Gumbel noise (Gumbel 1954; Maddison, Tarlow, Minka 2014), so it does not depend on
how many tokens a step accepted: drafter-invariant speculative decoding (Daliri, Musco, Suresh 2024).

A draw takes one row and is the reference; ``own_tokens`` computes the same tokens for many rows in one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import NoTokenLeft
from outpace.transfer import widened

NO_TOKEN_LEFT = "every token is excluded, or a logit is NaN: check the logits processors and the model"
_MASK = (1 << 64) - 1
WEYL = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Stream(IntEnum):
    """Independent random streams of one seed; using one stream for two purposes would bias the output."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), on a 64-bit word."""
    value = (value ^ value >> 30) * MULTIPLIERS[0] & _MASK
    value = (value ^ value >> 27) * MULTIPLIERS[1] & _MASK
    return value ^ value >> 31


def key(seed: int, *words: int) -> int:
    """A 64-bit key from a seed and words. Each word is mixed in turn; words are never added up."""
    state = mix(seed & _MASK ^ WEYL)
    for word in words:
        state = mix(state ^ mix((word & _MASK) * WEYL + 1 & _MASK))
    return state


def signed(value: int) -> int:
    """A 64-bit word as the int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


Words = TypeVar("Words", Tensor, NDArray[np.int64])


def _mix_words(words: Words) -> Words:
    """``mix`` on int64 words; the masks turn arithmetic shifts into logical ones."""
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * signed(MULTIPLIERS[0])
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * signed(MULTIPLIERS[1])
    return words ^ (words >> 31 & (1 << 33) - 1)


def words_of(tokens: Tensor) -> Tensor:
    """A mixed word for each of these token ids, of the same shape."""
    return _mix_words((tokens + 1) * signed(WEYL))


@lru_cache(maxsize=8)
def token_words(vocabulary: int, device: torch.device) -> Tensor:
    """A mixed word for each token id, shape [vocabulary]."""
    return words_of(torch.arange(vocabulary, device=device))


def _unit(words: Tensor) -> Tensor:
    """The top 52 bits of each word as a float64 strictly between 0 and 1 (53 bits could round to 1)."""
    return ((words >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52


def uniform(word: int) -> float:
    """A number strictly between 0 and 1 from a 64-bit key."""
    return ((word >> 12) + 0.5) * 2.0**-52


def noise_of(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, from int64 words, each a token's word xor a key."""
    return -torch.log(-torch.log(_unit(_mix_words(words))))


def host_noise(words: NDArray[np.int64]) -> NDArray[np.float64]:
    """``noise_of`` on the host, faster for few words; its logarithms may round differently."""
    units = ((_mix_words(words) >> 12 & (1 << 52) - 1) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(units))
    return noise


def gumbel(word: int, vocabulary: int, device: torch.device, tokens: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise of a key, float64, for ``tokens`` or for the whole vocabulary."""
    words = token_words(vocabulary, device)
    if tokens is not None:
        words = words[tokens]
    return noise_of(words ^ signed(word))


def _perturbed(scores: Tensor, word: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The places of scores that are not excluded, and these scores plus the key's Gumbel noise, float64.

    If any score is infinity, all other tokens are excluded.

    Args:
        ids: the token of each score; None if it is the score's place.
    """
    scores = widened(scores)
    peak = float(scores.max())
    if not peak > -math.inf:
        raise NoTokenLeft(NO_TOKEN_LEFT)
    left = (scores == peak if peak == math.inf else scores > -math.inf).nonzero().squeeze(1)
    if ids is None:
        noise = gumbel(word, len(scores), scores.device, left)
    else:
        noise = noise_of(words_of(ids[left]) ^ signed(word))
    return left, noise if peak == math.inf else scores[left] + noise


def noisy_argmax(scores: Tensor, word: int, ids: Tensor | None = None) -> int:
    """The place of the Gumbel-max draw from softmax(scores), shape [n].

    If any score is infinity, all other tokens are excluded.

    Args:
        ids: the token of each score, [n], which decides its noise; None if it is the score's place.

    Raises:
        NoTokenLeft: every score is minus infinity, or one is NaN.
    """
    left, perturbed = _perturbed(scores, word, ids)
    return int(left[torch.argmax(perturbed)])


def noisy_top(
    scores: Tensor, word: int, count: int, ids: Tensor | None = None
) -> tuple[list[int], list[float]]:
    """Draws from softmax(scores), shape [n], without replacement, in the order of drawing.

    These are the tokens with the highest scores plus Gumbel noise (Kool, van Hoof, Welling 2019, section 3);
    the first is ``noisy_argmax``. Fewer than ``count`` if fewer tokens are not excluded.

    Args:
        ids: as of ``noisy_argmax``.

    Returns:
        The places of the draws, and for each the log of its share in the softmax over the noisy scores: how
        clear the order is.

    Raises:
        NoTokenLeft: every score is minus infinity, or one is NaN.
    """
    left, perturbed = _perturbed(scores, word, ids)
    best, places = perturbed.topk(min(count, len(left)))
    return left[places].tolist(), (best - perturbed.logsumexp(dim=0)).tolist()


@dataclass(frozen=True)
class Key:
    """Key of a sequence's draws.

    Attributes:
        seed: the sequence's seed.
        coupled: whether drafts may be drawn with the target's own noise, which makes them agree more often
            under ``match``. False for verifiers that need independent drafts.
    """

    seed: int
    coupled: bool = True

    def target(self, index: int) -> int:
        """Key of the target's own draw of the output token at ``index``."""
        return key(self.seed, Stream.TARGET, index)

    def node(self, stream: Stream, root: int, node: int) -> int:
        """Key of a draw at a node of the draft whose root precedes the output token at index ``root``."""
        return key(self.seed, stream, root, node)
