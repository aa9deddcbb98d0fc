"""From logits to tokens: processing, keyed noise, and the draws that drafters and verifiers make.

The noise is a function of (seed, stream, output index or node, token id) and of nothing else: an integer
hash, the same on every device. The target's own draw at an output index is the argmax of the processed
logits plus Gumbel noise of that index (Gumbel 1954; Maddison, Tarlow, Minka 2014), so it does not depend on
how many tokens a step accepted: drafter-invariant speculative decoding (Daliri, Musco, Suresh 2024).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from outpace.core import LogitsProcessor, NoTokenLeft, SamplingParams

NO_TOKEN_LEFT = "every token is excluded, or a logit is NaN: check the logits processors and the model"
_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Stream(IntEnum):
    """Separate sources of randomness of one seed: sharing one between two purposes biases the output."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), on a 64-bit word."""
    value = (value ^ value >> 30) * _MULTIPLIERS[0] & _MASK
    value = (value ^ value >> 27) * _MULTIPLIERS[1] & _MASK
    return value ^ value >> 31


def key(seed: int, *words: int) -> int:
    """A 64-bit key of a seed and some words. Each is mixed in turn, never added to another."""
    state = mix(seed & _MASK ^ _WEYL)
    for word in words:
        state = mix(state ^ mix((word & _MASK) * _WEYL + 1 & _MASK))
    return state


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix_words(words: Tensor) -> Tensor:
    """``mix`` on int64 words; the masks turn torch's arithmetic shifts into logical ones."""
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * _signed(_MULTIPLIERS[0])
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * _signed(_MULTIPLIERS[1])
    return words ^ (words >> 31 & (1 << 33) - 1)


@lru_cache(maxsize=8)
def _token_words(vocabulary: int, device: torch.device) -> Tensor:
    """A mixed word for each token id, shape [vocabulary]."""
    return _mix_words(torch.arange(1, vocabulary + 1, device=device) * _signed(_WEYL))


def _unit(words: Tensor) -> Tensor:
    """The top 52 bits of each word as a float64 strictly between 0 and 1 (one bit more could round to 1)."""
    return ((words >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52


def uniform(word: int) -> float:
    """A number strictly between 0 and 1 from a 64-bit key."""
    return ((word >> 12) + 0.5) * 2.0**-52


def gumbel(word: int, vocabulary: int, device: torch.device, tokens: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise of a key, float64: for each of ``tokens``, or for the whole vocabulary."""
    words = _token_words(vocabulary, device)
    if tokens is not None:
        words = words[tokens]
    return -torch.log(-torch.log(_unit(_mix_words(words ^ _signed(word)))))


def _perturbed(scores: Tensor, word: int) -> tuple[Tensor, Tensor]:
    """The tokens that are left, and their scores plus the key's Gumbel noise, float64.

    Tokens with a score of infinity leave the others no chance.
    """
    scores = scores.double()
    peak = float(scores.max())
    if not peak > -math.inf:
        raise NoTokenLeft(NO_TOKEN_LEFT)
    left = (scores == peak if peak == math.inf else scores > -math.inf).nonzero().squeeze(1)
    noise = gumbel(word, scores.shape[-1], scores.device, left)
    return left, noise if peak == math.inf else scores[left] + noise


def best_token(scores: Tensor) -> int:
    """The token with the highest score, shape [vocabulary]; the first of equals.

    Raises:
        NoTokenLeft: every score is minus infinity, or one is NaN.
    """
    best = int(scores.argmax())  # of a NaN, where there is one
    if not float(scores[best]) > -math.inf:
        raise NoTokenLeft(NO_TOKEN_LEFT)
    return best


def noisy_argmax(scores: Tensor, word: int) -> int:
    """The Gumbel-max draw from softmax(scores), shape [vocabulary]; noise only over tokens that are left.

    Tokens with a score of infinity leave the others no chance.

    Raises:
        NoTokenLeft: every score is minus infinity, or one is NaN.
    """
    left, perturbed = _perturbed(scores, word)
    return int(left[torch.argmax(perturbed)])


def noisy_top(scores: Tensor, word: int, count: int) -> tuple[list[int], list[float]]:
    """Draws from softmax(scores), shape [vocabulary], without replacement, in the order they are drawn.

    The tokens with the highest scores plus Gumbel noise (Kool, van Hoof, Welling 2019, section 3); the first
    is ``noisy_argmax``. There are fewer than ``count`` where fewer tokens are left. With each comes the log
    of its share in the softmax of those noisy scores: how clear the order is.

    Raises:
        NoTokenLeft: every score is minus infinity, or one is NaN.
    """
    left, perturbed = _perturbed(scores, word)
    best, places = perturbed.topk(min(count, len(left)))
    return left[places].tolist(), (best - perturbed.logsumexp(dim=0)).tolist()


def warp(scores: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p and min-p on rows of scores, shape [..., vocabulary], as transformers does.

    Excluded tokens get -inf. The input is left as it is, unless nothing is asked for.
    """
    if params.greedy:
        return scores
    if params.temperature < 1e-3:  # dividing could overflow, or the divisor be 0 in float32
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / max(params.temperature, 1e-30)
    elif params.temperature != 1:
        scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        least = torch.topk(scores, params.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if params.top_p < 1:
        ordered, order = torch.sort(scores, descending=False)
        outside = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        outside[..., -1] = False
        scores = scores.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    if params.min_p > 0:
        probabilities = scores.softmax(dim=-1)
        least = params.min_p * probabilities.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probabilities < least, -torch.inf)
    return scores


class Processor:
    """Applies one sequence's parameters to its rows of logits; counts what penalties need."""

    def __init__(self, params: SamplingParams, prompt: Seq[int]) -> None:
        self.params = params
        self._repetition = params.repetition_penalty != 1
        self._counting = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._seen = set(prompt) if self._repetition else set()
        self._counts: Counter[int] = Counter()
        self.plain = params.greedy and not (
            params.logit_bias or params.logits_processors or self._repetition or self._counting
        )

    def observe(self, token: int) -> None:
        """Note an emitted token."""
        if self._repetition:
            self._seen.add(token)
        if self._counting:
            self._counts[token] += 1

    def __call__(self, row: Tensor, prefix: Seq[int]) -> Tensor:
        """Scores at the end of ``prefix`` (prompt and output), from its row of logits, shape [vocabulary]."""
        scores = self.adjust(row)
        if self.params.logits_processors:
            input_ids = torch.tensor([prefix], device=row.device)
            scores = _run(self.params.logits_processors, input_ids, scores)
        return warp(scores, self.params)

    def adjust(self, row: Tensor, more: Seq[int] = ()) -> Tensor:
        """A float32 copy of the row with bias and penalties; ``more`` are guessed tokens after the prefix."""
        params = self.params
        scores = row.to(torch.float32, copy=True)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row.device)
            scores[ids] += torch.tensor(list(params.logit_bias.values()), device=row.device)
        if self._repetition:
            ids = torch.tensor(list(self._seen.union(more)), device=row.device)
            seen, penalty = scores[ids], params.repetition_penalty
            scores[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)
        counts = self._counts + Counter(more) if self._counting else None
        if counts:
            ids = torch.tensor(list(counts), device=row.device)
            times = torch.tensor(list(counts.values()), device=row.device, dtype=torch.float32)
            scores[ids] -= params.presence_penalty + params.frequency_penalty * times
        return scores


def _run(processors: Seq[LogitsProcessor], input_ids: Tensor, scores: Tensor) -> Tensor:
    rows = scores[None]
    for processor in processors:
        rows = processor(input_ids, rows)
    return rows[0]


class Logits:
    """The target's rows for one sequence at one step, shape [1 + nodes, vocabulary]; node -1 is the root.

    Args:
        rows: the logits.
        best: the most probable token of each row, if known already: see ``best_tokens``.
    """

    def __init__(self, rows: Tensor, best: Seq[int] | None = None) -> None:
        self._rows = rows
        self._best = best

    @property
    def rows(self) -> Tensor:
        return self._rows

    def __getitem__(self, node: int) -> Tensor:
        return self.rows[node + 1]

    def gather(self, nodes: Seq[int]) -> Tensor:
        """The rows of some nodes, shape [n, vocabulary]."""
        return self.rows[[node + 1 for node in nodes]]

    def best(self, node: int) -> int:
        """The most probable token at a node; -1 where every logit is minus infinity, or one is NaN."""
        if self._best is None:
            self._best = best_tokens(self.rows)
        return self._best[node + 1]


def best_tokens(rows: Tensor) -> list[Any]:
    """The most probable token of each row, shape [..., vocabulary], nested as the rows are.

    It is -1 in a row where every logit is minus infinity, or one is NaN.
    """
    best = rows.argmax(dim=-1, keepdim=True)  # of a NaN, where there is one
    found: list[Any] = best.masked_fill(~(rows.gather(-1, best) > -math.inf), -1).squeeze(-1).tolist()
    return found


def logits_of_each(rows: Tensor, spans: Seq[slice], greedy: bool) -> list[Logits]:
    """Each sequence's logits of a batch.

    Args:
        rows: [N, vocabulary].
        spans: where each sequence's rows lie.
        greedy: the most probable tokens will be asked for: found here for all in one go.
    """
    best = best_tokens(rows) if greedy else None
    return [Logits(rows[span], None if best is None else best[span]) for span in spans]


class SelectedLogits(Logits):
    """The rows of the root and of some nodes, as those of a draft of their own.

    Args:
        whole: the rows of the draft that they are from.
        nodes: the node there that each node is here.
    """

    def __init__(self, whole: Logits, nodes: Seq[int]) -> None:
        self._whole = whole
        self._nodes = [*nodes, -1]  # the root's is the last entry, so that index -1 finds it

    @property
    def rows(self) -> Tensor:
        return self.gather(range(-1, len(self._nodes) - 1))

    def __getitem__(self, node: int) -> Tensor:
        return self._whole[self._nodes[node]]

    def gather(self, nodes: Seq[int]) -> Tensor:
        return self._whole.gather([self._nodes[node] for node in nodes])

    def best(self, node: int) -> int:
        return self._whole.best(self._nodes[node])


@dataclass(frozen=True)
class Key:
    """What a sequence's draws are keyed by.

    Attributes:
        seed: the sequence's seed.
        coupled: whether drafts may be drawn with the target's own noise. That makes them agree more often
            under ``match``; a verifier that needs independent drafts says no.
    """

    seed: int
    coupled: bool = True

    def target(self, index: int) -> int:
        """For the target's own draw of the output token at ``index``."""
        return key(self.seed, Stream.TARGET, index)

    def node(self, stream: Stream, root: int, node: int) -> int:
        """For a draw at a node of the draft whose root precedes the output token at index ``root``."""
        return key(self.seed, stream, root, node)


def draw_rows(rows: Tensor, indices: Seq[int], params: SamplingParams, seed_key: Key) -> list[int]:
    """The target's keyed draws at several rows at once: cheap guesses of what it will say there.

    Penalties and processors depend on a prefix that a guess does not have yet and are left out, so these are
    guesses, never the output.

    Args:
        rows: logits, shape [n, vocabulary].
        indices: output index of the token that follows each row, n of them.
    """
    if params.greedy:
        best: list[int] = rows.argmax(dim=-1).tolist()
        return best
    scores = warp(rows.float(), params).double()
    distinct = {index: place for place, index in enumerate(dict.fromkeys(indices))}
    noise = torch.stack([gumbel(seed_key.target(i), rows.shape[-1], rows.device) for i in distinct])
    drawn: list[int] = (scores + noise[[distinct[i] for i in indices]]).argmax(dim=-1).tolist()
    return drawn


def normalise(weights: Tensor) -> Tensor:
    """Weights of at least 0 as a float64 distribution, shape [vocabulary]."""
    weights = weights.double()
    return weights / weights.sum()
