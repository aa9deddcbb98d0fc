"""Lossy verifiers: a drafted token that is not the target's own is accepted if the target finds it likely.

Each but ``lenient`` is a rule on the target's distribution at a node. If no child is the target's own draw,
the child with the highest target probability among those that the rule allows is accepted; if the rule allows
none, the target's own draw is emitted. So every token that is not drafted is the one that plain decoding
draws there. The rules return log probabilities of the tokens that may be accepted, minus infinity for the
others, shape [vocabulary].
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core import Draft, OutpaceError, Verdict
from outpace.draws.logits import Logits
from outpace.spec import check_least
from outpace.verify.base import Draw, Verifier
from outpace.verify.match import match
from outpace.verify.rejection import rejection, try_in_turn


def typical(q: Tensor, epsilon: float, delta: float) -> Tensor:
    """Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1): q(x) > min(epsilon, delta exp(-H(q))).

    Args:
        q: the target's distribution, shape [vocabulary].
    """
    entropy = float(torch.special.entr(q).sum())
    return q.log().masked_fill(q <= min(epsilon, delta * math.exp(-entropy)), -torch.inf)


def top_beta(logprobs: Tensor, beta: int, tau: float) -> Tensor:
    """SpecDec's relaxed match (Xia et al. 2023): in the top beta, and within tau of the best.

    Args:
        logprobs: the target's log probabilities, shape [vocabulary].
        tau: the maximum gap, in nats.
    """
    best = logprobs.topk(min(beta, len(logprobs))).values
    outside = (logprobs < best[-1]) | (best[0] - logprobs > tau)
    return logprobs.masked_fill(outside, -torch.inf)


def bild(logprobs: Tensor, threshold: float) -> Tensor:
    """BiLD's rollback policy (Kim et al. 2023): the target's cross-entropy with the draft is not too high.

    The draft's prediction is a point mass at the drafted token x, so its cross-entropy is -log q(x).

    Args:
        logprobs: the target's log probabilities, shape [vocabulary].
        threshold: the highest cross-entropy that is not rolled back, in nats.
    """
    return logprobs.masked_fill(-logprobs > threshold, -torch.inf)


@dataclass(frozen=True)
class Relaxed(Verifier):
    """Base of lossy verifiers with a rule on the target's distribution at a node."""

    coupled: ClassVar[bool] = True
    lossy: ClassVar[bool] = True

    @abstractmethod
    def allowed(self, logits: Logits, draw: Draw, node: int) -> Tensor:
        """Scores [vocabulary] of tokens that may be accepted after ``node``; minus infinity for others."""

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        return match(logits, draft, draw, partial(self.allowed, logits, draw))


@dataclass(frozen=True)
class Typical(Relaxed):
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

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise OutpaceError(f"typical: epsilon must be above 0 and at most 1, not {self.epsilon}")
        if not 0 < self.delta < math.inf:
            raise OutpaceError(f"typical: delta must be a finite number above 0, not {self.delta}")

    def allowed(self, logits: Logits, draw: Draw, node: int) -> Tensor:
        return typical(draw.distribution(logits, node), self.epsilon, self.delta)


@dataclass(frozen=True)
class TopBeta(Relaxed):
    """Lossy: accepts drafted tokens that are among the target's most probable ones.

    Attributes:
        beta: an accepted token is among this many most probable ones, at least 1.
        tau: maximum gap of its log probability to the highest one, in nats, at least 0.
    """

    beta: int = 3
    tau: float = 1.0

    name: ClassVar[str] = "top_beta"
    paper: ClassVar[str] = (
        "Xia et al. 2023, Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq "
        "Generation (arXiv 2203.16487)"
    )

    def __post_init__(self) -> None:
        check_least("top_beta", self, beta=1)
        if not self.tau >= 0:
            raise OutpaceError(f"top_beta: tau must be at least 0, not {self.tau}")

    def allowed(self, logits: Logits, draw: Draw, node: int) -> Tensor:
        return top_beta(draw.logprobs(logits, node), self.beta, self.tau)


@dataclass(frozen=True)
class BiLD(Relaxed):
    """Lossy: accepts drafted tokens up to the first one that is too unlikely under the target.

    The paper's fallback policy, which stops drafting if the small model is unsure, is the draft model's
    ``min_confidence``.

    Attributes:
        threshold: the highest -log q(x) of an accepted token, in nats, at least 0.
    """

    threshold: float = 2.0

    name: ClassVar[str] = "bild"
    paper: ClassVar[str] = "Kim et al. 2023, Speculative Decoding with Big Little Decoder (arXiv 2302.07863)"

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise OutpaceError(f"bild: threshold must be at least 0, not {self.threshold}")

    def allowed(self, logits: Logits, draw: Draw, node: int) -> Tensor:
        return bild(draw.logprobs(logits, node), self.threshold)


@dataclass(frozen=True)
class Lenient(Verifier):
    """Lossy: speculative sampling with the draft's probabilities scaled down.

    A drafted token x is accepted with probability min(1, q(x) / (l p(x))), and a rejection subtracts l p from
    q. A token's probability in the output is at most 1 / l times its own, without a lower bound.
    If greedy, a drafted token is accepted if its probability is at least l times the highest one.

    Attributes:
        lenience: l, above 0 and at most 1; 1 is lossless.
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
