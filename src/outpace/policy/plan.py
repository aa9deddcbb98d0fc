"""What an engine and the policy that plans its drafts tell each other: a plan, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from outpace.core import Draft
from outpace.policy.sure import Sure
from outpace.tree import worthwhile


@dataclass(frozen=True)
class DraftPlan:
    """Plan of a step's drafts.

    Attributes:
        nodes: maximum number of nodes per sequence; 0 for a plain step.
        row_cost: time of each further node as a share of a plain step; None if not measured.
        narrow: leave out nodes that pay only in later steps (``Drafter.narrow_widths``).
        sure: what to draft all the same in a plain step if the drafter is sure enough.
        plain_seconds: time of a plain step of the batch; None if not measured.
    """

    nodes: int
    row_cost: float | None = None
    narrow: bool = False
    sure: Sure | None = None
    plain_seconds: float | None = None

    def take(self, draft: Draft) -> int:
        """The number of nodes of a draft to verify: as many as pay, if the draft states chances."""
        if self.sure is not None:
            return 0 if draft.chances is None else self.sure.take(draft.chances)
        if self.row_cost is None or draft.chances is None:
            return self.nodes
        return worthwhile(draft.chances[: self.nodes], self.row_cost)


class Policy(Protocol):
    """Policy that plans each step of a batch and learns from its outcome.

    Attributes:
        timed: whether its plans depend on the clock, so that runs are not reproducible.
    """

    @property
    def timed(self) -> bool: ...

    def plan(self, batch: int) -> DraftPlan:
        """The plan for the next step of a batch of this many sequences."""

    def learn(self, outcome: Outcome) -> None:
        """Learn from the outcome of the step planned last."""


@dataclass(frozen=True)
class Outcome:
    """Measured outcome of one step of a batch.

    Attributes:
        plan: the step's plan.
        drafted: number of nodes of each sequence's draft, at most as many as planned.
        paths: accepted nodes of each sequence's draft.
        draft_seconds: time of the drafter: proposing, and learning from the step.
        verify_seconds: time of the forward, the verifier and the cache; None if the step did other work too
            (rows of a prompt), so that its time is not representative.
        row_seconds: time of a further row in a wide forward, measured on prompts; None if unknown.
        stated: sum of the chances that the verified drafts state; 0 if they state none.
    """

    plan: DraftPlan
    drafted: Seq[int]
    paths: Seq[Seq[int]]
    draft_seconds: float
    verify_seconds: float | None
    row_seconds: float | None = None
    stated: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the forward, which is as wide as the longest draft of the batch."""
        return len(self.paths) * (1 + max(self.drafted))
