"""Children of a node from a draft model's logits: the most probable tokens, or draws."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import NoTokenLeft, OutpaceError, SamplingParams
from outpace.draws.noise import Stream, host_noise, noisy_argmax, noisy_top, signed, words_of
from outpace.draws.sampling import warp
from outpace.native import layers
from outpace.sequence import Sequence
from outpace.transfer import gather, widened

Noise = Literal["coupled", "independent", "greedy"]
_COLDEST = 1e-3  # temperature below which the best token is as good as certain


def check_confidence(method: str, min_confidence: float) -> None:
    """Refuse a value of the option ``min_confidence`` of a method that is not a probability."""
    if not 0 <= min_confidence <= 1:
        raise OutpaceError(f"{method}: min_confidence must be between 0 and 1, not {min_confidence}")


def check_grown(method: str, weighs: bool, noise: Noise) -> None:
    """Refuse independent draws of a tree that grows by confidence."""
    if weighs and noise == "independent":
        raise OutpaceError(
            f"{method}: expand chooses among candidates by their tokens, so they cannot be independent "
            "draws; leave out one of the two"
        )


def log_confidence(min_confidence: float) -> float:
    """The log of ``min_confidence``; minus infinity for 0."""
    return math.log(min_confidence) if min_confidence else -math.inf


@dataclass(frozen=True)
class Children:
    """Candidates for the children of a node.

    Attributes:
        tokens: the candidates, the best or the first drawn first.
        weights: the log of the draft model's confidence in each; zeros unless ``Draws.weigh``.
        peak: the greatest such log of any token; independent of the candidates if draws are independent.
        distribution: the distribution they were drawn from, float64, shape [vocabulary], or that of the ids
            given to ``Draws.sampled``; None for point masses.
    """

    tokens: list[int]
    weights: list[float]
    peak: float = 0.0
    distribution: Tensor | None = None


NOTHING = Children([], [])


@dataclass(frozen=True)
class Draws:
    """Rules by which children are made from a row of logits, shape [vocabulary].

    Attributes:
        noise: the noise with which candidates are drawn; "greedy" takes the most probable tokens instead.
        replacement: whether candidates are drawn with replacement, so that siblings may be equal.
        weigh: whether to compute confidences.
        independent: False takes the most probable tokens if the target's noise may not be shared: for shapes
            that choose among candidates by their tokens, which no distribution describes.
        listed: the target's noise is added to this number of the most probable tokens alone; 0 for all of
            them. Any token may be drafted, so one that is missed costs no more than a wrong one.
    """

    noise: Noise = "coupled"
    replacement: bool = False
    weigh: bool = False
    independent: bool = True
    listed: int = 0

    def best(self, rows: Tensor, counts: Seq[int], ids: Tensor | None = None) -> list[Children]:
        """The most probable tokens of n rows, shape [n, vocabulary], in one pass.

        Args:
            ids: tokens of the columns; None if they are the tokens.
        """
        most = max(counts)
        if most == 1 and not self.weigh:
            best = rows.argmax(dim=-1)
            first: list[int] = (best if ids is None else ids[best]).tolist()
            return [Children([token], [0.0]) for token in first]
        scores, tokens, totals = layers.best(rows, min(most, rows.shape[-1]))
        if ids is not None:
            tokens = ids[tokens]
        found = []
        # The numbers are few: lists take less time than tensors.
        for own, names, total, count in zip(
            scores.tolist(), tokens.tolist(), totals.tolist(), counts, strict=True
        ):
            kept = [place for place in range(min(count, len(own))) if own[place] > -math.inf]
            weights = [min(own[place] - total, 0.0) if self.weigh else 0.0 for place in kept]
            found.append(Children([names[place] for place in kept], weights, weights[0]) if kept else NOTHING)
        return found

    def among_best(
        self,
        rows: Tensor,
        sequences: Seq[Sequence],
        depths: Seq[int],
        counts: Seq[int],
        ids: Tensor | None = None,
    ) -> list[Children]:
        """Candidates drawn with the target's own noise from the ``listed`` best tokens of n rows.

        Args:
            rows: logits, [n, vocabulary], which no parameter adjusts.
            depths: of the candidates in the draft.
            ids: tokens of the columns; None if they are the tokens.
        """
        scores, tokens, totals = layers.best(rows, min(self.listed, rows.shape[-1]))
        tokens = tokens if ids is None else ids[tokens]
        words = words_of(tokens)
        found = []
        for place, (sequence, depth, count) in enumerate(zip(sequences, depths, counts, strict=True)):
            own = scores[place].double().numpy()
            heated, kept = _kept(own, float(totals[place]), sequence.params)
            key = signed(self.word(sequence, sequence.output_length, depth, 0))
            noisy = heated[:kept] + host_noise(words[place, :kept].numpy() ^ key)
            order = np.argsort(-noisy, kind="stable")[:count]
            total = float(np.logaddexp.reduce(noisy)) if kept else 0.0
            clear = [min(float(noisy[one]) - total, 0.0) for one in order]
            names = tokens[place].tolist()
            found.append(Children([names[one] for one in order], clear, clear[0]) if kept else NOTHING)
        return found

    def draws_from(self, sequence: Sequence) -> bool:
        """True if candidates are drawn for this sequence, not chosen."""
        if sequence.params.greedy or self.noise == "greedy":
            return False
        return self.independent or self.shares(sequence)

    def shares(self, sequence: Sequence) -> bool:
        """True if a sequence's candidates are drawn with the target's own noise."""
        return self.noise == "coupled" and sequence.key.coupled

    def word(self, sequence: Sequence, root: int, depth: int, first: int) -> int:
        """Key of the draw of candidates at a depth of the draft, of which the first is node ``first``.

        Args:
            root: output index of the token that follows the root.
        """
        if self.shares(sequence):
            return sequence.key.target(root + depth)
        return sequence.key.node(Stream.DRAFT, root, first)

    def sampled(
        self,
        sequence: Sequence,
        scores: Tensor,
        depth: int,
        first: int,
        count: int,
        ids: Tensor | None = None,
    ) -> Children:
        """Candidates drawn from processed scores, shape [n], and their distribution over the same n tokens.

        With the target's own noise they are drawn without replacement: the first is the target's token if the
        two models agree, one of the next if they nearly agree.

        Args:
            depth: depth of the candidates in the draft.
            first: node index of the first candidate.
            ids: the token of each score, [n]; None if they are the vocabulary's.
        """
        scores = widened(warp(scores, sequence.params))
        root = sequence.output_length
        shares, word = self.shares(sequence), self.word(sequence, root, depth, first)
        try:
            if count == 1 and not self.weigh:
                places, clear = [noisy_argmax(scores, word, ids)], [0.0]
            elif self.replacement:
                words = [sequence.key.node(Stream.DRAFT, root, first + place) for place in range(count)]
                places, clear = [noisy_argmax(scores, own, ids) for own in words], []
            else:
                places, clear = noisy_top(scores, word, count, ids)
        except NoTokenLeft:
            return NOTHING
        p = scores.softmax(dim=-1)
        # A probability may round to 0; verifiers do not accept such a token, since p never draws it.
        chances = gather(p, places).tolist()
        kept = [rank for rank, chance in enumerate(chances) if chance > 0]
        tokens = [places[rank] for rank in kept] if ids is None else ids[places][kept].tolist()
        if not self.weigh:
            return Children(tokens, [0.0] * len(tokens), distribution=p)
        if shares:
            # The target adds the same noise, so the confidence is a token's lead with the noise added.
            weights = [min(clear[rank], 0.0) for rank in kept]
            return Children(tokens, weights, weights[0] if weights else 0.0, p)
        weights = [min(math.log(chances[rank]), 0.0) for rank in kept]
        return Children(tokens, weights, float(p.max().log()), p)


def _kept(best: NDArray[np.float64], total: float, params: SamplingParams) -> tuple[NDArray[np.float64], int]:
    """The best logits of a row, in descending order, heated, and how many of them the parameters keep.

    The weight of the others is known at temperature 1 alone, and estimated at another by that of the last
    of the best: few are close to a limit, and a draft need not be right.

    Args:
        total: the log of the sum of the exponentials of the whole row.
    """
    best = best[np.isfinite(best)]
    if not len(best) or not math.isfinite(total):
        return best, 0
    below, cooling = best - best[0], 1 / max(params.temperature, _COLDEST)
    heated = below * cooling
    weights = np.exp(heated)
    others = max(math.exp(total - best[0]) - float(np.exp(below).sum()), 0.0)
    others *= math.exp(min(below[-1] * (cooling - 1), 0.0))
    kept = len(best)
    if 0 < params.top_k <= kept:
        kept, others = params.top_k, 0.0
    sums = np.cumsum(weights[:kept])
    if params.top_p < 1:
        kept = int((sums - weights[:kept] < params.top_p * (sums[-1] + others)).sum())
    if params.min_p > 0:
        kept = min(kept, int((weights >= params.min_p).sum()))
    return heated, max(kept, 1)
