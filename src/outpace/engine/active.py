"""A sequence in an engine's batch, and what drafts for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from outpace.cache import Slot
from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.sequence import Sequence, Step


class Drafts(Protocol):
    """What drafts for sequences of a batch: ``Drafting``."""

    drafter: Drafter[Any]
    shared: Any
    top: int
    reads: bool
    waits: bool

    @property
    def drafts(self) -> bool:
        """True if the latest plan was to draft."""

    def decide(self, members: Seq[Active]) -> None:
        """Plan a step for these sequences."""

    def propose(self, members: Seq[Active]) -> dict[Active, Draft]:
        """Draft for each sequence."""

    def nodes(self, active: Active, draft: Draft) -> int:
        """Number of nodes of a draft to verify."""

    def observe(self, steps: Mapping[Active, Step]) -> None:
        """Pass the outcome of its drafts to the drafter."""

    def learn(
        self, steps: Mapping[Active, Step], drafting: float, verifying: float | None, per_row: float | None
    ) -> None:
        """Report a step and its seconds to the policy."""


@dataclass(eq=False)
class Active:
    """A sequence in the batch, with its rows in the cache and the drafter's state.

    Attributes:
        hidden: the target's hidden states of its prompt, in pieces as they were fed, for drafters that read
            them.
        ready: whether its prompt is in the cache, except for its ``chunk``.
        chunk: number of rows of its prompt that the next step's forward feeds, before its root if it is
            ready; maybe 0. None if that feeds none.
        started: whether the drafter has a state for it.
        observed: whether the observer knows of it.
        told: whether the observer has been told once that it has left.
        debt: seconds of its own work in steps (masks, for example) by which it is ahead of its share.
        doubt: whether an error of its own may have left the cache or the drafter in disorder.
    """

    sequence: Sequence
    slot: Slot
    number: int
    drafting: Drafts
    hidden: list[dict[int, Tensor]] = field(default_factory=list)
    ready: bool = False
    chunk: int | None = None
    state: Any = None
    started: bool = False
    observed: bool = False
    told: bool = False
    doubt: bool = False
    debt: float = 0.0

    @property
    def ahead(self) -> int:
        """Number of rows of its prompt that the next step's forward feeds."""
        return self.chunk or 0

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of preemption, the lowest first: by priority, then the newest first."""
        return self.sequence.priority, -self.number


def fail(members: Iterable[Active], error: Exception) -> None:
    """End sequences with an error that the cache or a drafter raised."""
    for active in members:
        active.sequence.fail(error)
        active.doubt |= not isinstance(error, OutpaceError)


def by_drafter(batch: Iterable[Active]) -> dict[Drafts, list[Active]]:
    members: dict[Drafts, list[Active]] = {}
    for active in batch:
        members.setdefault(active.drafting, []).append(active)
    return members
