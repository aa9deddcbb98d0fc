"""Verifiers: which drafted tokens stand, and which tokens a step emits. Pure; no model, no cache.

A verifier draws through a ``Draw`` only, so that a test can put one in that enumerates every branch.
Letters: q is the target's distribution, p the draft's (Chen et al. 2023; Leviathan et al. 2023 have them the
other way round).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outpace.core import Draft, OutpaceError, Verdict
from outpace.sampling import Logits
from outpace.tree import children, is_chain


class Draw(Protocol):
    """The draws of one sequence at one step. Node -1 is the root."""

    def token(self, logits: Logits, node: int) -> int:
        """The target's own token after ``node``."""

    def distribution(self, logits: Logits, node: int) -> Tensor:
        """The target's processed distribution q after ``node``, float64, shape [vocabulary]."""

    def accept(self, probability: float, node: int) -> bool:
        """True with this probability."""

    def choose(self, distribution: Tensor, node: int) -> int:
        """A token drawn from these weights, shape [vocabulary]."""

    def emit(self, token: int, logits: Logits, node: int) -> bool:
        """Commit the token that follows ``node``; False if the sequence ends with it."""


def match(logits: Logits, draft: Draft, draw: Draw) -> Verdict:
    """Accept while the target's own keyed draw equals a child: the very tokens of plain decoding.

    The walk follows the set of all children with the drawn token, since a tree may hold a text twice.
    Greedy: Stern et al. 2018, section 3; sampled: Daliri, Musco, Suresh 2024, algorithm 2.
    """
    below = children(draft.parents)
    path: list[int] = []
    tokens: list[int] = []
    nodes = [-1]
    while True:
        token = draw.token(logits, nodes[0])
        tokens.append(token)
        goes_on = draw.emit(token, logits, nodes[0])
        nodes = [child for node in nodes for child in below[node] if draft.tokens[child] == token]
        if not nodes:
            break
        path.append(nodes[0])
        if not goes_on:
            break
    return Verdict(_ancestors(draft, path), tokens)


def _ancestors(draft: Draft, path: list[int]) -> list[int]:
    """The chain that ends in the path's last node: among equal siblings the walk may have switched."""
    if not path:
        return path
    chain = [path[-1]]
    while draft.parents[chain[-1]] >= 0:
        chain.append(draft.parents[chain[-1]])
    return chain[::-1]


def rejection(logits: Logits, draft: Draft, draw: Draw) -> Verdict:
    """Speculative sampling on a chain: the target's distribution, not its very tokens.

    Accepts x with probability min(1, q(x) / p(x)), at a rejection draws from the normalised positive part of
    q - p, after the whole chain from q (Chen et al. 2023, algorithm 2; Leviathan et al. 2023, algorithm 1).
    A draft without distributions is a point mass: p(x) = 1.

    Raises:
        OutpaceError: the draft is not a chain, or it drafted a token of probability 0.
    """
    if not is_chain(draft.parents):
        raise OutpaceError("the rejection verifier takes chains; use verifier='match' for a drafter of trees")
    tokens: list[int] = []
    for node, drafted in enumerate(draft.tokens):
        parent = node - 1
        q = draw.distribution(logits, parent)
        p = _draft_distribution(draft, parent, drafted, q)
        if not draw.accept(min(1.0, float(q[drafted]) / float(p[drafted])), node):
            residual = (q - p).clamp(min=0)
            # Where p equals q up to rounding, the positive part may be empty; a draw from q is the limit.
            token = draw.choose(residual if residual.sum() > 0 else q, parent)
            draw.emit(token, logits, parent)
            return Verdict(list(range(node)), [*tokens, token])
        tokens.append(drafted)
        if not draw.emit(drafted, logits, parent):
            return Verdict(list(range(node + 1)), tokens)
    last = len(draft) - 1
    token = draw.choose(draw.distribution(logits, last), last)
    draw.emit(token, logits, last)
    return Verdict(list(range(len(draft))), [*tokens, token])


def _draft_distribution(draft: Draft, parent: int, drafted: int, q: Tensor) -> Tensor:
    """p after ``parent``, float64, where q is; shape [vocabulary]."""
    if draft.distributions is None:
        p = q.new_zeros(q.shape)
        p[drafted] = 1.0
        return p
    p = draft.distributions[parent].to(q)
    if p[drafted] <= 0:
        raise OutpaceError(f"the drafter drafted token {drafted} but gives it probability 0")
    return p


Verify = Callable[[Logits, Draft, Draw], Verdict]


@dataclass(frozen=True)
class Verifier:
    """A verifier and what the engine must know of it.

    Attributes:
        verify: the function.
        coupled: drafts may share the target's noise (exact only where the target's own draw decides).
        chains: it takes chains only.
        lossy: it changes the output's distribution.
    """

    verify: Verify
    coupled: bool = False
    chains: bool = False
    lossy: bool = False


VERIFIERS: dict[str, Verifier] = {
    "match": Verifier(match, coupled=True),
    "rejection": Verifier(rejection, chains=True),
}


def load_verifier(name: str) -> Verifier:
    """The verifier of this name.

    Raises:
        OutpaceError: there is none; the message lists those there are.
    """
    if name not in VERIFIERS:
        raise OutpaceError(f"unknown verifier {name!r}; there are: {', '.join(VERIFIERS)}")
    return VERIFIERS[name]
