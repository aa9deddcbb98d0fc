"""The interface of a verifier, a frozen dataclass of options, and of its draws.

A verifier draws only through a ``Draw``, so that a test can replace it by one that enumerates every branch.
A verifier that uses the draft's distribution refuses a drafted token to which this assigns probability 0;
``match`` and the lossy verifiers based on it never use it.
Notation: q is the target's distribution, p the draft's (Chen et al. 2023; Leviathan et al. 2023 swap them).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from outpace.core import Draft, OutpaceError, SamplingParams, Verdict
from outpace.draws.logits import Logits


class Draw(Protocol):
    """The draws of one sequence at one step. Node -1 is the root.

    A node is the last one of the path emitted so far, unless ``guessed`` gives further tokens before it.

    Attributes:
        greedy: the target takes its most probable tokens.
    """

    @property
    def greedy(self) -> bool: ...

    def token(self, logits: Logits, node: int) -> int:
        """The target's own token after ``node``."""

    def distribution(self, logits: Logits, node: int, guessed: Seq[int] = ()) -> Tensor:
        """The target's processed distribution q after ``node``, float64, shape [vocabulary].

        If greedy, a point mass: the limit of temperature 0.

        Args:
            guessed: tokens on the path to ``node`` that are not emitted yet.
        """

    def logprobs(self, logits: Logits, node: int) -> Tensor:
        """Log probabilities after ``node``: log q, or those at temperature 1 if greedy.

        float64, shape [vocabulary].
        """

    def accept(self, probability: float, node: int) -> bool:
        """Draw True with this probability."""

    def choose(self, distribution: Tensor, node: int) -> int:
        """Draw a token from these weights, shape [vocabulary]."""

    def emit(self, token: int, logits: Logits, node: int) -> bool:
        """Emit the token that follows ``node``; return False if the sequence ends with it."""


@dataclass(frozen=True)
class Verifier(ABC):
    """Decides which drafted tokens are accepted and which tokens a step emits; uses no model and no cache.

    Class attributes:
        name: name in spec strings.
        paper: publication of the method.
        coupled: drafts may use the target's noise: acceptance uses the target's own draw, or no draw at all.
        chains: only chains are supported, not trees.
        independent: sampled siblings must have been drawn with replacement.
        ahead: it needs distributions at nodes before the tokens on the path are emitted, so it cannot support
            ``logits_processors``, which are called for emitted tokens only.
        invariant: a seed's tokens do not depend on the drafts.
        lossy: it changes the output's distribution.
        by_tokens: it needs only the target's own tokens, not its distributions.
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
        """True if verification follows the target's own tokens, which can then be computed before it at once.

        A greedy distribution is a point mass at that token. ``logits_processors`` are called during
        verification, once per emitted token.
        """
        return (self.by_tokens or params.greedy) and not params.logits_processors

    def keeps_tokens(self, greedy: bool) -> bool:
        """True if it preserves the tokens of plain decoding, not only their distribution or less."""
        return self.invariant or (greedy and not self.lossy)

    @abstractmethod
    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        """Verify a draft: return the accepted path and the tokens of the step.

        Raises:
            OutpaceError: the verifier does not support the draft, or the draft contradicts its distributions.
        """

    def __str__(self) -> str:
        """The spec string with every option, marked if lossy."""
        options = [f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)]
        spec = ":".join([self.name, *filter(None, [",".join(options)])])
        return f"{spec} (lossy)" if self.lossy else spec


def proposal(draft: Draft, parent: int, token: int, like: Tensor) -> Tensor:
    """p, from which a child of ``parent`` was drawn; for a chosen child, a point mass at its ``token``.

    It has the dtype, device and shape [vocabulary] of ``like``.

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
        raise no_chance(token, drawn)
    return float(q[token]) / drawn


def no_chance(token: int, drawn: float) -> OutpaceError:
    """The error for a drafted token to which its own draft gives no probability."""
    return OutpaceError(
        f"the drafter drafted token {token} but gives it probability {drawn:g}; siblings drawn without "
        "replacement are all different, and each distribution is the one that was drawn from"
    )


def positive_part(weights: Tensor, otherwise: Tensor) -> Tensor:
    """The positive part of weights, normalised to a distribution, shape [vocabulary].

    If it is empty, which only rounding can cause, ``otherwise`` is the limit.
    """
    left = weights.clamp(min=0)
    total = left.sum()
    return left / total if total > 0 else otherwise
