"""``match``: comparison of the draft with the target's own draws. The tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core import Draft, Verdict
from outpace.draws.logits import Logits
from outpace.tree import children, path_to
from outpace.verify.base import Draw, Verifier

# Node -> scores of the tokens that may be accepted after it, shape [vocabulary]; others get minus infinity.
Allowed = Callable[[int], Tensor]


def match(logits: Logits, draft: Draft, draw: Draw, allowed: Allowed | None = None) -> Verdict:
    """Accept while the target's own keyed draw equals a child: exactly the tokens of plain decoding.

    The walk follows all children with the drawn token, since a tree may contain the same path twice.
    Greedy: Stern et al. 2018, section 3; sampled: Daliri, Musco, Suresh 2024, algorithm 2.

    Args:
        allowed: scores of lossy verifiers: if no child has the target's own token, the walk follows the child
            with the highest score.
    """
    below = children(draft.parents)
    path: list[int] = []
    tokens: list[int] = []
    nodes = [-1]
    while True:
        node = nodes[0]
        token = draw.token(logits, node)
        candidates = [child for parent in nodes for child in below[parent]]
        if allowed is not None and candidates:
            token = _relax(token, [draft.tokens[child] for child in candidates], allowed, node)
        tokens.append(token)
        goes_on = draw.emit(token, logits, node)
        nodes = [child for child in candidates if draft.tokens[child] == token]
        if not nodes:
            break
        path.append(nodes[0])
        if not goes_on:
            break
    return Verdict(path_to(draft.parents, path[-1] if path else -1), tokens)


def _relax(token: int, guesses: Seq[int], allowed: Allowed, node: int) -> int:
    """The target's own token if it was drafted, otherwise the allowed guess with the highest score."""
    if token in guesses:
        return token
    scores = allowed(node)[list(guesses)]
    best = int(scores.argmax())
    return guesses[best] if scores[best] > -torch.inf else token


@dataclass(frozen=True)
class Match(Verifier):
    """The tokens of plain decoding with the same seed."""

    name: ClassVar[str] = "match"
    paper: ClassVar[str] = (
        "Stern et al. 2018, Blockwise Parallel Decoding for Deep Autoregressive Models (arXiv 1811.03115); "
        "Daliri et al. 2024, Coupling without Communication (arXiv 2408.07978)"
    )
    coupled: ClassVar[bool] = True
    invariant: ClassVar[bool] = True
    by_tokens: ClassVar[bool] = True

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        return match(logits, draft, draw)
