"""Drafts that a drafter is surer of than of most, in steps that would otherwise be plain.

What is known of acceptance comes from recent drafts of any kind. Where a further row costs a plain step or
more, a few failures end drafting, and narrow trials cannot pay even if all their nodes are accepted. A
drafter that states chances may still propose what is likely enough, such as the continuation of a long match.
Such a draft is verified if it pays by its stated chances and the measured costs. The chances are scaled by
the ratio of accepted to expected nodes, and losses are limited by an account, as a governor's are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

WIDTHS = (3, 7, 15, 31)  # with the root, whole tiles of kernels that multiply four or eight rows at once

_LIMIT = 20.0  # maximum balance of an account, in plain steps
_PRIOR = 12.0  # weight, in nodes, of the assumption that stated chances are right
_KEEP = 0.9  # share of earlier drafts' weight that a new one leaves
_FORGET = 0.98  # the same for a plain step, so that drafts are tried again after failures
_PROMISES = (
    0.5,
    0.6,
    0.7,
    0.8,
    0.85,
    0.9,
    0.95,
)  # chances of a first node, of which the lowest that may pay is used


@dataclass(frozen=True)
class Sure:
    """An offer to draft in a plain step.

    Attributes:
        prices: seconds of steps with ``WIDTHS`` nodes, in plain steps.
        factor: factor on stated chances.
    """

    prices: tuple[float, ...]
    factor: float = 1.0

    @property
    def nodes(self) -> int:
        return WIDTHS[-1]

    def take(self, chances: Seq[float]) -> int:
        """The number of nodes with the most tokens per time, 0 if none pays.

        Args:
            chances: acceptance probability per node, in descending order.
        """
        sums = [0.0, *accumulate(chances)]
        best, nodes = 1.0, 0
        for width, price in zip(WIDTHS, self.prices, strict=True):
            own = min(width, len(chances))
            speed = (1 + self.factor * sums[own]) / price
            if speed > best:
                best, nodes = speed, own
            if own < width:
                break
        return nodes

    @cached_property
    def least(self) -> float:
        """The chance of a first node from which a draft may pay, if each node is as likely as the first."""
        for promise in _PROMISES:
            if self.take([promise**depth for depth in range(1, self.nodes + 1)]):
                return promise
        return math.inf


class Account:
    """Account of what sure drafts may lose, and of the ratio of their accepted to their expected nodes.

    They are offered while the balance is above 0. A draft may overdraw it: one wide draft that fails costs
    more than all savings, so gains are kept up to a higher limit, and pay for it.

    Args:
        savings: initial balance, in plain steps.
        share: share of the time that they may lose.
    """

    def __init__(self, savings: float, share: float) -> None:
        self._share = share
        self.balance = savings
        self._right = self._stated = 0.0

    @property
    def factor(self) -> float:
        return min(1.0, (self._right + _PRIOR) / (self._stated + _PRIOR))

    def count(self, gained: float = 0.0) -> None:
        """Count a step, and what it gained in plain steps."""
        self.balance = min(_LIMIT, self.balance + self._share + gained)

    def forget(self) -> None:
        """Count a step without such a draft."""
        self._right, self._stated = self._right * _FORGET, self._stated * _FORGET

    def observe(self, stated: float, right: int) -> None:
        """Count a draft: the sum of its stated chances, and its accepted nodes."""
        self._right, self._stated = self._right * _KEEP + right, self._stated * _KEEP + stated
