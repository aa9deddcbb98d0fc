"""Seconds of a step whose draft several ranks share, and from which width on that pays: a pure model.

A rank's forward over r rows takes V(r) seconds, telling each other the tokens C, and of a draft of n nodes
the busiest rank feeds s(n). A step then takes V(1 + n) where every rank feeds the whole draft, and
V(1 + s(n)) + C where they share it. (Fu et al. 2024, section 3.4, with measured V and C.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outpace.policy.costs import Curve
from outpace.policy.governor import WIDTHS

_MARGIN = 1.05  # times its seconds that a shared step is charged: measurements are never exact


@dataclass(frozen=True)
class Latency:
    """The model of one machine.

    Attributes:
        forwards: V at some numbers of rows, in seconds.
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
        return self._curve.at(1 + nodes)

    def shared(self, nodes: int) -> float:
        """Seconds of a step over a draft that is."""
        return self._curve.at(1 + self.share(nodes)) + self.telling

    @cached_property
    def pays_from(self) -> int | None:
        """The narrowest draft that is faster shared, in nodes; None where none of the usual widths is."""
        return next((n for n in WIDTHS if _MARGIN * self.shared(n) < self.alone(n)), None)

    def seconds(self, nodes: int) -> float:
        """Seconds of a step over a draft that is shared where that pays."""
        least = self.pays_from
        return self.alone(nodes) if least is None or nodes < least else self.shared(nodes)

    def costs(self) -> dict[str, Any]:
        """Costs for ``Governor.begin_with``, of a single sequence, up to twice the widest measured."""
        most = 2 * max(self.forwards)
        points = [[1.0 + nodes, self.seconds(nodes)] for nodes in (0, *WIDTHS) if nodes <= most]
        return {"verify": {"1": points}}
