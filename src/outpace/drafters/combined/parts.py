"""Drafters that draft by others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.drafters.base import Drafter, State


@dataclass(frozen=True)
class OfParts(Drafter[State]):
    """Base of drafters that draft by others: what can be said of one of these can be said of it.

    Attributes:
        parts: the drafters.
    """

    parts: tuple[Drafter[Any], ...]

    @property
    def probabilities(self) -> bool:
        return any(part.probabilities for part in self.parts)

    @property
    def samples(self) -> bool:
        return any(part.samples for part in self.parts)

    @property
    def drops_distributions(self) -> bool:
        return any(part.drops_distributions for part in self.parts)

    @property
    def trees(self) -> bool:
        return any(part.trees for part in self.parts)

    @property
    def ramp(self) -> int:
        return max(part.ramp for part in self.parts)

    @property
    def reads_references(self) -> bool:
        return any(part.reads_references for part in self.parts)

    @property
    def reads_top(self) -> int:
        return max(part.reads_top for part in self.parts)
