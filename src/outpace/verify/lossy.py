"""Lossy verifiers: a drafted token that is not the target's own is accepted if the target finds it likely.

Each but ``lenient`` is a rule on the target's distribution at a node. Where no child is the target's own
draw, the walk goes to the child that the rule allows and the target finds most likely; where the rule allows
none, the target's own draw is emitted. So whatever is not drafted is what plain decoding draws there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core import Draft, OutpaceError, Verdict
from outpace.sampling import Logits
from outpace.verify.base import Draw, Verifier
from outpace.verify.match import match
from outpace.verify.rejection import rejection, try_in_turn


def typical(q: Tensor, epsilon: float, delta: float) -> Tensor:
    """Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1): q(x) > min(epsilon, delta exp(-H(q))).

    Args:
        q: the target's distribution, shape [vocabulary].

    Returns:
        log q where a token may be accepted, minus infinity elsewhere, shape [vocabulary].
    """
    entropy = float(torch.special.entr(q).sum())
    return q.log().masked_fill(q <= min(epsilon, delta * math.exp(-entropy)), -torch.inf)


def top_beta(logprobs: Tensor, beta: int, tau: float) -> Tensor:
    """SpecDec's relaxed match (Xia et al. 2023): in the top beta, and within tau of the best.

    Args:
        logprobs: the target's log probabilities, shape [vocabulary].
        tau: the gap allowed, in nats.

    Returns:
        The log probabilities where a token may be accepted, minus infinity elsewhere, shape [vocabulary].
    """
    best = logprobs.topk(min(beta, len(logprobs))).values
    outside = (logprobs < best[-1]) | (best[0] - logprobs > tau)
    return logprobs.masked_fill(outside, -torch.inf)


def bild(logprobs: Tensor, threshold: float) -> Tensor:
    """BiLD's rollback policy (Kim et al. 2023): the target's cross-entropy with the draft is not too high.

    The draft's prediction is taken as the token it chose, so its cross-entropy is -log q(x).

    Args:
        logprobs: the target's log probabilities, shape [vocabulary].
        threshold: the highest cross-entropy that is not rolled back, in nats.

    Returns:
        The log probabilities where a token may be accepted, minus infinity elsewhere, shape [vocabulary].
    """
    return logprobs.masked_fill(-logprobs > threshold, -torch.inf)


@dataclass(frozen=True)
class Typical(Verifier):
    """Lossy: accepts drafted tokens that are probable, or typical of an uncertain target. Exact if greedy.

    Attributes:
        epsilon: probability above which a token is always accepted, above 0 and at most 1.
        delta: factor of exp(-entropy) in the threshold for uncertain distributions, above 0.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    name: ClassVar[str] = "typical"
    paper: ClassVar[str] = (
        "Cai et al. 2024, Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads "
        "(arXiv 2401.10774), section 2.3.1"
    )
    coupled: ClassVar[bool] = True
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise OutpaceError(f"typical: epsilon must be above 0 and at most 1, not {self.epsilon}")
        if not 0 < self.delta < math.inf:
            raise OutpaceError(f"typical: delta must be a finite number above 0, not {self.delta}")

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        def allowed(node: int) -> Tensor:
            return typical(draw.distribution(logits, node), self.epsilon, self.delta)

        return match(logits, draft, draw, allowed)


@dataclass(frozen=True)
class TopBeta(Verifier):
    """Lossy: accepts drafted tokens that are among the target's best.

    Attributes:
        beta: a token is among this many most probable ones, at least 1.
        tau: its log probability is within this of the best one's, in nats, at least 0.
    """

    beta: int = 3
    tau: float = 1.0

    name: ClassVar[str] = "top_beta"
    paper: ClassVar[str] = (
        "Xia et al. 2023, Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq "
        "Generation (arXiv 2203.16487)"
    )
    coupled: ClassVar[bool] = True
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise OutpaceError(f"top_beta: beta must be at least 1, not {self.beta}")
        if not self.tau >= 0:
            raise OutpaceError(f"top_beta: tau must be at least 0, not {self.tau}")

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        def allowed(node: int) -> Tensor:
            return top_beta(draw.logprobs(logits, node), self.beta, self.tau)

        return match(logits, draft, draw, allowed)


@dataclass(frozen=True)
class BiLD(Verifier):
    """Lossy: accepts drafted tokens up to where the target finds one too unlikely, and rolls back.

    The paper's other half, the fallback to the target where the small model is unsure, is the draft model's
    ``min_confidence``.

    Attributes:
        threshold: the highest -log q(x) of an accepted token, in nats, at least 0.
    """

    threshold: float = 2.0

    name: ClassVar[str] = "bild"
    paper: ClassVar[str] = "Kim et al. 2023, Speculative Decoding with Big Little Decoder (arXiv 2302.07863)"
    coupled: ClassVar[bool] = True
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise OutpaceError(f"bild: threshold must be at least 0, not {self.threshold}")

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        def allowed(node: int) -> Tensor:
            return bild(draw.logprobs(logits, node), self.threshold)

        return match(logits, draft, draw, allowed)


@dataclass(frozen=True)
class Lenient(Verifier):
    """Lossy: speculative sampling that takes the draft's probabilities for smaller than they are.

    A drafted token x is accepted with probability min(1, q(x) / (l p(x))), and a rejection takes l p from q.
    No token comes with more than 1 / l times its probability; how much less is not bounded.
    Greedy, a drafted token is accepted whose probability is at least l times the best one's.

    Attributes:
        lenience: l, above 0 and at most 1; at 1 nothing is lost.
    """

    lenience: float = 0.5

    name: ClassVar[str] = "lenient"
    paper: ClassVar[str] = (
        "Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding "
        "(arXiv 2211.17192), appendix A.5"
    )
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise OutpaceError(f"lenient: lenience must be above 0 and at most 1, not {self.lenience}")

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        if not draw.greedy:
            return rejection(logits, draft, draw, partial(try_in_turn, lenience=self.lenience))

        def allowed(node: int) -> Tensor:
            logprobs = draw.logprobs(logits, node)
            return top_beta(logprobs, len(logprobs), -math.log(self.lenience))

        return match(logits, draft, draw, allowed)
