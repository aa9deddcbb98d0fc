"""``spectr``: k-sequential selection among independent candidates. Preserves the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core import Draft, OutpaceError, Verdict
from outpace.draws.logits import Logits
from outpace.verify.base import Draw, Verifier, likelihood_ratio, positive_part, proposal
from outpace.verify.rejection import rejection, try_in_turn

_HALVINGS = 20


def division_factor(q: Tensor, p: Tensor, count: int) -> float:
    """Gamma: the smallest factor, up to a millionth of ``count``, at which k-sequential selection is valid.

    With b(gamma) the sum of min(p, q / gamma), it solves 1 - (1 - b)^count = gamma b (Sun et al. 2023,
    section 4). The left side falls and the right side rises with gamma, so it is computed by bisection of
    [1, count]. A larger factor is also exact but accepts less, so the upper end is returned.

    Args:
        q, p: the target's and the draft's distribution, shape [vocabulary].
        count: number of candidates, at least 1.
    """
    drawn = p > 0
    q, p = q[drawn], p[drawn]
    low, high = 1.0, float(count)
    for _ in range(_HALVINGS if count > 1 else 0):
        middle = (low + high) / 2
        share = float(torch.minimum(p, q / middle).sum())
        if _any_of(share, count) > middle * share:
            low = middle
        else:
            high = middle
    return high


def _any_of(share: float, count: int) -> float:
    """Probability that one of ``count`` candidates is accepted, each with probability ``share``."""
    return 1 - max(1 - share, 0.0) ** count


def _select(draft: Draft, siblings: Seq[int], q: Tensor, draw: Draw) -> tuple[int | None, Tensor]:
    """The first accepted sibling, or None, and the remaining q."""
    if draft.distributions is None or len(siblings) < 2:
        return try_in_turn(draft, siblings, q, draw)
    if not draft.replacement:
        raise OutpaceError(
            "verifier='spectr' takes siblings drawn with replacement, and these were drawn without; use "
            "verifier='rejection' or 'traversal'"
        )
    p = proposal(draft, draft.parents[siblings[0]], draft.tokens[siblings[0]], q)
    gamma = division_factor(q, p, len(siblings))
    for child in siblings:
        if draw.accept(min(1.0, likelihood_ratio(q, p, draft.tokens[child]) / gamma), child):
            return child, q
    each = torch.minimum(p, q / gamma)
    share = float(each.sum())
    if share > 0:
        q = positive_part(q - each * (_any_of(share, len(siblings)) / share), otherwise=q)
    return None, q


def spectr(logits: Logits, draft: Draft, draw: Draw) -> Verdict:
    """Speculative sampling with k-sequential selection at each node (SpecTr, Sun et al. 2023, algorithm 3).

    A node's k candidates, independent draws from p, are tried in turn, each accepted with probability
    min(1, q / (gamma p)); if none is, a token is drawn from the remaining q. With the smallest valid gamma,
    the acceptance rate is at least 1 - 1/e times that of the optimal transport of k draws onto q. For a
    single candidate, and for tokens that a drafter chooses, gamma is 1: they are tried as by ``rejection``,
    which is optimal for them.

    Raises:
        OutpaceError: siblings drawn without replacement, and what ``rejection`` refuses.
    """
    return rejection(logits, draft, draw, _select)


@dataclass(frozen=True)
class SpecTr(Verifier):
    """The distribution of plain decoding; selects among independent candidates by optimal transport.

    Its acceptance rate is near the optimum, at a cost that hardly grows with the number of candidates.
    """

    name: ClassVar[str] = "spectr"
    paper: ClassVar[str] = (
        "Sun et al. 2023, SpecTr: Fast Speculative Decoding via Optimal Transport (arXiv 2310.15141)"
    )
    independent: ClassVar[bool] = True

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        return spectr(logits, draft, draw)
