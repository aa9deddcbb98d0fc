"""Observers of an engine's steps, which may change later drafts, as online learning does."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from torch import Tensor

from outpace.drafters.base import Drafter
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel


class Observer(Protocol):
    """An object that an engine calls between forwards: ``Engine(target, drafter, observer=...)``.

    It is called in the engine's thread, with the same data as the drafter, after the drafter. It may change a
    drafter's weights only there, so that all nodes of a draft come from the same weights.

    Attributes:
        hidden_layers: the target's layers whose hidden states it needs, numbered as in ``Output.hidden``.
        timed: whether its changes depend on the clock.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]: ...

    @property
    def timed(self) -> bool: ...

    def joined(self, sequence: Sequence, hidden: Mapping[int, Tensor]) -> None:
        """Handle that a sequence has been prefilled.

        Args:
            hidden: layer -> [len(tokens) - 1, size], for all its rows but the root; empty if there are none.
        """

    def stepped(self, steps: Seq[Step]) -> None:
        """Handle the end of a step, with the steps of all sequences, including those that ended with it."""

    def left(self, sequence: Sequence) -> None:
        """Handle that a sequence that had joined has ended or was removed.

        After an interrupt, or an error of its own, this may be called again, or for one whose ``joined`` did
        not end.
        """


class Learner(Observer, Protocol):
    """An observer that changes a drafter while it is used, with that drafter and the target of its engine."""

    @property
    def target(self) -> TargetModel: ...

    @property
    def drafter(self) -> Drafter[Any]: ...
