"""Observers of an engine's steps, which may change what is drafted later: online learning."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from outpace.sequence import Sequence, Step


class Observer(Protocol):
    """An object that an engine calls between forwards: ``Engine(target, drafter, observer=...)``.

    It is called in the engine's thread, and sees what the drafter sees, after the drafter has. It may change
    a drafter's weights there, and there alone: a draft is then made with one set of weights from its first
    node to its last.

    Attributes:
        hidden_layers: layers of the target whose hidden states it is to be shown, as ``Output.hidden`` counts
            them.
        timed: whether what it changes depends on the clock.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]: ...

    @property
    def timed(self) -> bool: ...

    def joined(self, sequence: Sequence, hidden: Mapping[int, Tensor]) -> None:
        """A sequence has been prefilled.

        Args:
            hidden: layer -> [len(tokens) - 1, size], of all its rows but the root; empty where there is none.
        """

    def stepped(self, steps: Seq[Step]) -> None:
        """A step of all sequences has ended; those that ended with it are included."""

    def left(self, sequence: Sequence) -> None:
        """A sequence that had joined has ended, or was removed."""
