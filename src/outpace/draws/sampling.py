"""Sampling: processing of logits, keyed noise, and the draws that drafters and verifiers make.

The noise is a function of (seed, stream, output index or node, token id) and of nothing else: an integer
hash, the same on every device. The target's own draw at an output index is the argmax of the processed
logits plus that index's Gumbel noise (Gumbel 1954; Maddison, Tarlow, Minka 2014), so it does not depend on
how many tokens a step accepted: drafter-invariant speculative decoding (Daliri, Musco, Suresh 2024).

These functions take one row at a time and are the reference; ``own_tokens`` computes the same tokens for many
rows in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import LogitsProcessor, NoTokenLeft, SamplingParams
from outpace.transfer import upload, widened

NO_TOKEN_LEFT = "every token is excluded, or a logit is NaN: check the logits processors and the model"
# Below this temperature the division could overflow, or the divisor underflow to 0 in float32.
TINY_TEMPERATURE = 1e-3
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


def margin_of(vocabulary: int) -> float:
    """Error bound of a sum of probabilities: the reference adds in float32, in an unspecified order."""
    return vocabulary * 2.0**-23 + 1e-5


def best_token(scores: Tensor) -> int:
    """The token with the highest score, shape [vocabulary]; the first one on a tie.

    Raises:
        NoTokenLeft: every score is minus infinity, or one is NaN.
    """
    best = int(scores.argmax())  # the index of a NaN, if there is one
    if not float(scores[best]) > -math.inf:
        raise NoTokenLeft(NO_TOKEN_LEFT)
    return best


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


def warp(scores: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p and min-p on rows of scores, shape [..., vocabulary], as transformers does.

    Excluded tokens get -inf. The input is not modified, and is itself returned if nothing changes.
    """
    return scores if params.greedy else truncate(heat(scores, params), params)


def heat(scores: Tensor, params: SamplingParams) -> Tensor:
    """Rows of scores, shape [..., vocabulary], divided by a temperature above 0."""
    if params.temperature == 1:
        return scores
    if params.temperature < TINY_TEMPERATURE:
        scores = scores - scores.amax(dim=-1, keepdim=True)
    # A tensor: CUDA multiplies by the inverse of a scalar, so the quotient would depend on the device.
    return scores / scores.new_full((), max(params.temperature, 1e-30))


def truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, top-p and min-p on rows of scores, shape [..., vocabulary]: excluded tokens get -inf."""
    if 0 < params.top_k < scores.shape[-1]:
        least = torch.topk(scores, params.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if params.top_p < 1:
        scores = scores.masked_fill(_outside(scores, params.top_p), -torch.inf)
    if params.min_p > 0:
        probabilities = scores.softmax(dim=-1)
        least = params.min_p * probabilities.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probabilities < least, -torch.inf)
    return scores


def _outside(scores: Tensor, top_p: float) -> Tensor:
    """Mask of the tokens outside the smallest set with probability top-p, of rows [..., vocabulary]."""
    if scores.device.type == "cpu" and scores.dtype.itemsize >= 4:
        # NumPy sorts in a fraction of PyTorch's time if the order is not wanted, which matters only where
        # the boundary divides equal scores.
        ordered = torch.from_numpy(np.sort(scores.detach().numpy(), axis=-1))
        count = _tail(ordered, top_p).sum(dim=-1, keepdim=True)
        least = ordered.gather(-1, count)
        if bool((ordered.gather(-1, (count - 1).clamp(min=0)) < least).logical_or(count == 0).all()):
            return scores < least
    ordered, order = torch.sort(scores, descending=False)
    outside = _tail(ordered, top_p)
    return outside.scatter(-1, order, outside)


def _tail(ordered: Tensor, top_p: float) -> Tensor:
    """Mask of the first of rows of ascending scores that together have a probability of at most 1 - top-p."""
    outside = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    outside[..., -1] = False
    return outside


def best_tokens(rows: Tensor | NDArray[np.float32]) -> list[int]:
    """The most probable token of each row, shape [n, vocabulary], the first one on a tie.

    -1 for a row in which no logit is above -inf, or one is NaN.
    """
    if isinstance(rows, Tensor):
        if rows.device.type != "cpu":
            values, tokens = rows.max(dim=-1)
            found: list[int] = tokens.masked_fill(~(values > -torch.inf), -1).tolist()
            return found
        # NumPy's argmax takes a seventh of the time of torch's, but NumPy has no bfloat16.
        rows = (rows.float() if rows.dtype.itemsize < 4 else rows).detach().numpy()
    places: list[int] = rows.argmax(axis=-1).tolist()
    return [token if rows[row, token] > -math.inf else -1 for row, token in enumerate(places)]


class Processor:
    """Processor of one sequence's rows of logits; counts the tokens that penalties concern.

    Attributes:
        plain: whether the next token is the argmax of the raw logits.
        adjusts: whether ``adjust`` changes a row.
        bias: the ids and the float32 values of ``logit_bias``.
    """

    def __init__(self, params: SamplingParams, prompt: Seq[int]) -> None:
        self.params = params
        repetition = params.repetition_penalty != 1
        self.penalises = repetition or params.presence_penalty != 0 or params.frequency_penalty != 0
        bias = params.logit_bias or {}
        self.bias = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        self.adjusts = bool(bias) or self.penalises
        self.plain = params.greedy and not (self.adjusts or params.logits_processors)
        # Tokens that penalties concern, and their occurrences in the output (0 if only in the prompt).
        known = dict.fromkeys(prompt if repetition else ())
        self._place = {token: place for place, token in enumerate(known)}
        self._ids = np.array(list(self._place), np.int64)
        self._times = np.zeros(len(self._ids), np.float32)

    def observe(self, token: int) -> None:
        """Count an emitted token."""
        if not self.penalises:
            return
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):  # the arrays are full: double them
            self._ids = np.concatenate([self._ids, np.zeros(place + 8, np.int64)])
            self._times = np.concatenate([self._times, np.zeros(place + 8, np.float32)])
        self._ids[place] = token
        self._times[place] += 1

    def counts(self, more: Seq[int] = ()) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens that penalties concern, without repetitions, and their numbers of occurrences in the output.

        Args:
            more: guessed tokens after the output.
        """
        size = len(self._place)
        ids, times = self._ids[:size], self._times[:size]
        if not (more and self.penalises):
            return ids, times
        times, new = times.copy(), dict[int, int]()
        for token in more:
            if token in self._place:
                times[self._place[token]] += 1
            else:
                new[token] = new.get(token, 0) + 1
        added = np.array(list(new.values()), np.float32)
        return np.concatenate([ids, np.array(list(new), np.int64)]), np.concatenate([times, added])

    def __call__(self, row: Tensor, prefix: Seq[int]) -> Tensor:
        """Processed scores, shape [vocabulary], of the row of logits after ``prefix`` (prompt and output)."""
        scores = self.adjust(row)
        if self.params.logits_processors:
            input_ids = upload([prefix], row.device)
            scores = _run(self.params.logits_processors, input_ids, scores)
        return warp(scores, self.params)

    def adjust(self, row: Tensor, more: Seq[int] = ()) -> Tensor:
        """A float32 copy of a row, shape [vocabulary], with bias and penalties applied.

        Args:
            more: guessed tokens after the output.
        """
        params, device = self.params, row.device
        scores = row.to(torch.float32, copy=True)
        if len(self.bias[0]):
            ids, values = (upload(array, device) for array in self.bias)
            scores[ids] += values
        if self.penalises:
            ids, times = (upload(array, device) for array in self.counts(more))
            scores[ids] = penalised(
                scores[ids],
                times,
                scores.new_full((), params.repetition_penalty),
                scores.new_full((), params.presence_penalty),
                scores.new_full((), params.frequency_penalty),
            )
        return scores


def penalised(
    scores: Tensor, times: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Scores of tokens of the text, with the penalties applied.

    Args:
        scores: float32, one per token; the other arguments have the same shape or are scalars.
        times: occurrences of each token in the output; 0 for tokens of the prompt alone.
        repetition, presence, frequency: the penalties.
    """
    scores = torch.where(scores < 0, scores * repetition, scores / repetition)
    return scores - torch.where(times > 0, presence + frequency * times, 0.0)


@dataclass(frozen=True)
class NoEnd:
    """Logits processor that excludes the tokens which end an output from its first tokens.

    Attributes:
        start: number of tokens before the output.
        least: number of tokens of the output before which none may end it.
        ends: the tokens that end it.
    """

    start: int
    least: int
    ends: tuple[int, ...]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, vocabulary] after input_ids [1, n]."""
        if input_ids.shape[-1] - self.start >= self.least:
            return scores
        return scores.index_fill(-1, upload(self.ends, scores.device), -torch.inf)


def _run(processors: Seq[LogitsProcessor], input_ids: Tensor, scores: Tensor) -> Tensor:
    rows = scores[None]
    for processor in processors:
        rows = processor(input_ids, rows)
    return rows[0]


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
