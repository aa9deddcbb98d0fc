"""A drafter in an engine: what it prepared, its policy, and the sequences it drafts for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace.core import Draft
from outpace.drafters.base import Drafter, SequenceDrafter
from outpace.engine.scheduler import Active
from outpace.policy.governor import Outcome, Plan, Policy
from outpace.sequence import Step
from outpace.targets.base import TargetModel


@dataclass(eq=False)
class Drafting:
    """A drafter of an engine. Sequences of several ride in one forward; each is measured by itself.

    Attributes:
        policy: decides how much of its drafts is verified; None for all.
        shared: what the drafter prepared.
        plan: of the step under way.
    """

    drafter: Drafter[Any]
    policy: Policy | None
    target: TargetModel
    shared: Any = field(init=False)
    plan: Plan | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shared = self.drafter.prepare(self.target)

    def decide(self, members: Seq[Active]) -> None:
        """Plan a step for some sequences."""
        self.plan = None if self.policy is None else self.policy.plan(len(members))
        for active in members:
            sequence = active.sequence
            limits = [sequence.params.drafts.num_speculative_tokens, self.plan.nodes if self.plan else None]
            sequence.budget = min((limit for limit in limits if limit is not None), default=None)
            sequence.row_cost = None if self.plan is None else self.plan.row_cost

    def calls(self, members: Iterable[Active]) -> list[list[Active]]:
        """The sequences that a call to the drafter is for: one, where the drafter handles one at a time."""
        cls, members = type(self.drafter), list(members)
        alone = cls.propose is SequenceDrafter.propose and cls.observe is SequenceDrafter.observe
        return [[one] for one in members] if alone or not members else [members]

    def propose(self, members: Seq[Active]) -> dict[Active, Draft]:
        """A draft for each sequence; an empty one where the drafter failed."""
        proposals = dict.fromkeys(members, Draft())
        if self.plan is not None and not self.plan.nodes:
            return proposals
        for some in self.calls(members):
            try:
                drafts = self.drafter.propose([a.state for a in some])
                proposals.update(zip(some, drafts, strict=True))
            except Exception as error:
                fail(some, error)
        return proposals

    def nodes(self, active: Active, draft: Draft) -> int:
        """Nodes of a draft that pay by the plan, and that the request allows."""
        nodes = len(draft) if self.plan is None else min(len(draft), self.plan.take(draft))
        most = active.sequence.params.drafts.num_speculative_tokens
        return nodes if most is None else min(nodes, most)

    def observe(self, steps: Mapping[Active, Step]) -> None:
        """Tell the drafter the outcome of its drafts."""
        for some in self.calls(steps):
            try:
                self.drafter.observe([a.state for a in some], [steps[a] for a in some])
            except Exception as error:
                fail(some, error)

    def learn(self, steps: Mapping[Active, Step], drafting: float, verifying: float | None) -> None:
        """Tell the policy of a step: its seconds are those of the whole batch, by the share of the rows."""
        if self.policy is not None and self.plan is not None and steps:
            sizes = [len(step.draft) for step in steps.values()]
            paths = [step.path for step in steps.values()]
            self.policy.learn(Outcome(self.plan, sizes, paths, drafting, verifying))


def fail(members: Iterable[Active], error: Exception) -> None:
    """End sequences with an error."""
    for active in members:
        active.sequence.fail(error)


def groups(batch: Iterable[Active]) -> dict[Drafting, list[Active]]:
    """The sequences of each drafter."""
    found: dict[Drafting, list[Active]] = {}
    for active in batch:
        found.setdefault(active.drafting, []).append(active)
    return found
