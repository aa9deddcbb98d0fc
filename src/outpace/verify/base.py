"""The contract of a verifier: a frozen dataclass of options, and the draws it may make.

A verifier draws through a ``Draw`` only, so that a test can put one in that enumerates every branch.
One that weighs the draft's distribution refuses a token that this gives no probability; ``match`` and the
lossy verifiers never look at it.
Letters: q is the target's distribution, p the draft's (Chen et al. 2023; Leviathan et al. 2023 have them the
other way round).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from outpace.core import Draft, OutpaceError, SamplingParams, Verdict
from outpace.sampling import Logits


class Draw(Protocol):
    """The draws of one sequence at one step. Node -1 is the root.

    A node is the last of the path emitted so far, unless ``guessed`` names more tokens on the way to it.

    Attributes:
        greedy: the target takes its most probable tokens.
    """

    @property
    def greedy(self) -> bool: ...

    def token(self, logits: Logits, node: int) -> int:
        """The target's own token after ``node``."""

    def distribution(self, logits: Logits, node: int, guessed: Seq[int] = ()) -> Tensor:
        """The target's processed distribution q after ``node``, float64, shape [vocabulary].

        Greedy, it is a point mass: the limit of temperature 0.

        Args:
            guessed: tokens on the way to ``node`` that are not emitted yet.
        """

    def logprobs(self, logits: Logits, node: int) -> Tensor:
        """Log probabilities after ``node``: of q, or at temperature 1 if greedy.

        float64, shape [vocabulary].
        """

    def accept(self, probability: float, node: int) -> bool:
        """True with this probability."""

    def choose(self, distribution: Tensor, node: int) -> int:
        """A token drawn from these weights, shape [vocabulary]."""

    def emit(self, token: int, logits: Logits, node: int) -> bool:
        """Commit the token that follows ``node``; False if the sequence ends with it."""


@dataclass(frozen=True)
class Verifier(ABC):
    """Decides which drafted tokens are accepted, and which tokens a step emits. Knows no model and no cache.

    Class attributes:
        name: what spec strings call it.
        paper: where the method was published.
        coupled: drafts may share the target's noise: the target's own draw decides, or nothing does.
        chains: it takes chains only.
        independent: siblings that were sampled must have been drawn with replacement.
        ahead: it asks for distributions before the tokens on the way there are emitted, so it cannot serve
            ``logits_processors``, which see emitted tokens only.
        invariant: the tokens of a seed do not depend on what was drafted.
        lossy: it changes the output's distribution.
        by_tokens: the walk needs the target's own tokens alone, no distribution.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    coupled: ClassVar[bool] = False
    chains: ClassVar[bool] = False
    independent: ClassVar[bool] = False
    ahead: ClassVar[bool] = False
    invariant: ClassVar[bool] = False
    lossy: ClassVar[bool] = False
    by_tokens: ClassVar[bool] = False

    def uses_own_tokens(self, params: SamplingParams) -> bool:
        """True if a walk follows the target's own tokens, so that they may be found before it, in one pass.

        A greedy distribution is a point mass at that token. ``logits_processors`` are called during the walk,
        once for each emitted token.
        """
        return (self.by_tokens or params.greedy) and not params.logits_processors

    @abstractmethod
    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        """The accepted path and the tokens of a step.

        Raises:
            OutpaceError: a draft that the verifier does not take, or that contradicts its distributions.
        """

    def __str__(self) -> str:
        """Its spec string with every option, marked where it is lossy."""
        options = [f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)]
        spec = ":".join([self.name, *filter(None, [",".join(options)])])
        return f"{spec} (lossy)" if self.lossy else spec


def proposal(draft: Draft, parent: int, token: int, like: Tensor) -> Tensor:
    """p, from which a child of ``parent`` was drawn; of a draft that chooses, a point mass at its ``token``.

    With the dtype and on the device of ``like``, shape [vocabulary].

    Raises:
        OutpaceError: the draft was sampled, but has no distribution for this parent.
    """
    if draft.distributions is None:
        p = like.new_zeros(like.shape)
        p[token] = 1.0
        return p
    if parent not in draft.distributions:
        raise OutpaceError(
            f"the drafter gives no distribution for the children of node {parent}; one that samples gives "
            "the whole distribution of each parent's children, one that chooses gives none at all"
        )
    return draft.distributions[parent].to(like)


def likelihood_ratio(q: Tensor, p: Tensor, token: int) -> float:
    """q(token) / p(token).

    Raises:
        OutpaceError: the draft gives its own token probability 0.
    """
    drawn = float(p[token])
    if not drawn > 0:
        raise OutpaceError(
            f"the drafter drafted token {token} but gives it probability {drawn:g}; siblings drawn without "
            "replacement are all different, and each distribution is the one that was drawn from"
        )
    return float(q[token]) / drawn


def positive_part(weights: Tensor, otherwise: Tensor) -> Tensor:
    """The positive part of some weights as a distribution, shape [vocabulary].

    Where it is empty, which only rounding can bring about, ``otherwise`` is the limit.
    """
    left = weights.clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else otherwise
