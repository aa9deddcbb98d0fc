"""Latency model of steps whose draft is shared by several ranks: when sharing pays.

A rank's forward over r rows takes V(r) seconds, the exchange of tokens C seconds, and of a draft of n nodes
the busiest rank feeds s(n). A step takes V(1 + n) if every rank feeds the full draft, and V(1 + s(n)) + C if
they share it. (Fu et al. 2024, section 3.4, with measured V and C.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outpace.policy.costs import Curve
from outpace.policy.governor import WIDTHS

_MARGIN = 1.05  # factor on the seconds of a shared step, since measurements are inexact


@dataclass(frozen=True)
class LatencyModel:
    """Latency model of one machine.

    Attributes:
        forwards: V at measured numbers of rows, in seconds.
        telling: C.
        share: s.
    """

    forwards: Mapping[int, float]
    telling: float
    share: Callable[[int], int]

    @cached_property
    def _curve(self) -> Curve:
        curve = Curve()
        curve.take_over(sorted(self.forwards.items()))
        return curve

    def alone(self, nodes: int) -> float:
        """Seconds of a step over a draft that is not shared."""
        return self._curve.seconds_at(1 + nodes)

    def shared(self, nodes: int) -> float:
        """Seconds of a step over a shared draft."""
        return self._curve.seconds_at(1 + self.share(nodes)) + self.telling

    @cached_property
    def pays_from(self) -> int | None:
        """The smallest number of nodes, among the usual widths, for which sharing is faster; None if none."""
        return next((n for n in WIDTHS if _MARGIN * self.shared(n) < self.alone(n)), None)

    def seconds(self, nodes: int) -> float:
        """Seconds of a step over a draft that is shared if that is faster."""
        least = self.pays_from
        return self.alone(nodes) if least is None or nodes < least else self.shared(nodes)

    def costs(self) -> dict[str, Any]:
        """Costs for ``Governor.begin_with``, for one sequence, up to twice the widest measured width."""
        most = 2 * max(self.forwards)
        points = [[1.0 + nodes, self.seconds(nodes)] for nodes in (0, *WIDTHS) if nodes <= most]
        return {"verify": {"1": points}}
