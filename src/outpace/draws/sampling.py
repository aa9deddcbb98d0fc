"""Processing of logits: bias, penalties, temperature, top-k, top-p, min-p, and the most probable token.

These functions are the reference for one row; ``many_rows`` does the same for many in one pass. Draws
with noise are in ``noise``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import LogitsProcessor, NoTokenLeft, OutpaceError, SamplingParams
from outpace.draws.noise import NO_TOKEN_LEFT
from outpace.native.draw import as_float32
from outpace.transfer import upload

# Below this temperature the division could overflow, or the divisor underflow to 0 in float32.
TINY_TEMPERATURE = 1e-3


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
        rows = (as_float32(rows) if rows.dtype.itemsize < 4 else rows).detach().numpy()
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
        rows = processed(processor, input_ids, rows)
    return rows[0]


def processed(processor: LogitsProcessor, input_ids: Tensor, scores: Tensor) -> Tensor:
    """The scores that a logits processor returns, [1, vocabulary].

    Raises:
        OutpaceError: it returns something else than scores of this shape.
    """
    found: Any = processor(input_ids, scores)
    if isinstance(found, Tensor) and found.shape == scores.shape and found.is_floating_point():
        return found
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise OutpaceError(
        f"the logits processor {name} returned {what}; it must return scores like those that it was given, "
        f"{scores.dtype} {list(scores.shape)}"
    )
