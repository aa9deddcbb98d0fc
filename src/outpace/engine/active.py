"""A sequence in an engine's batch, and what drafts for it: a drafter, its prepared data and its policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from typing import Any

from torch import Tensor

from outpace.cache import Slot
from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter, SequenceDrafter
from outpace.engine.slow import tell
from outpace.policy.plan import DraftPlan, Outcome, Policy
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel

NOTHING = Draft()  # for a step without a draft
_SEEN = 64  # steps of a text after which a drafter that drafted nothing says why


class Stage(IntEnum):
    """How far a sequence is on its way through the batch."""

    READING = auto()  # its prompt is fed
    STARTED = auto()  # the drafter has a state for it, and looks at its text between the steps of others
    READY = auto()  # it decodes
    OBSERVED = auto()  # the observer knows of it
    LEAVING = auto()  # the observer is being told that it leaves; if that failed, it is told once more
    GONE = auto()


@dataclass(eq=False)
class Active:
    """A sequence in the batch, with its rows in the cache and the drafter's state.

    Attributes:
        number: sequence number of its arrival.
        drafting: what drafts for it.
        hidden: the target's hidden states of its prompt, in pieces as they were fed, for drafters that read
            them.
        stage: how far it is on its way.
        chunk: number of rows of its prompt that the next step's forward feeds, before its root if it is
            ready; maybe 0. None if that feeds none.
        debt: seconds of its own work in steps (masks, for example) by which it is ahead of its share.
        doubt: whether an error of its own may have left the cache or the drafter in disorder.
    """

    sequence: Sequence
    slot: Slot
    number: int
    drafting: Drafting
    hidden: list[dict[int, Tensor]] = field(default_factory=list)
    stage: Stage = Stage.READING
    chunk: int | None = None
    state: Any = None
    doubt: bool = False
    debt: float = 0.0

    @property
    def started(self) -> bool:
        """True if the drafter has a state for it."""
        return self.stage >= Stage.STARTED

    @property
    def ready(self) -> bool:
        """True if it decodes: its prompt is in the cache, except for its ``chunk``."""
        return self.stage >= Stage.READY

    @property
    def ahead(self) -> int:
        """Number of rows of its prompt that the next step's forward feeds."""
        return self.chunk or 0

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of preemption, the lowest first: by priority, then the newest first."""
        return self.sequence.priority, -self.number


@dataclass(eq=False)
class Drafting:
    """A drafter of an engine. Sequences of several drafters share a forward; each drafter has its own policy.

    Attributes:
        policy: decides how many nodes of its drafts are verified; None for all.
        shared: the value that the drafter's ``prepare`` returned.
        top: most probable tokens of the target that the drafter reads after each node.
        reads: whether the drafter reads hidden states.
        waits: whether it needs those of the prompt before it drafts.
        plan: the plan of the current step.
    """

    drafter: Drafter[Any]
    policy: Policy | None
    target: TargetModel
    shared: Any = field(init=False)
    top: int = field(init=False)
    reads: bool = field(init=False)
    waits: bool = field(init=False)
    plan: DraftPlan | None = field(init=False, default=None)
    _alone: bool = field(init=False)  # the drafter handles one sequence at a time

    def __post_init__(self) -> None:
        self.shared = self.drafter.prepare(self.target)
        self.top = min(self.drafter.reads_top, self.target.vocabulary)
        self.reads = bool(self.drafter.hidden_layers(self.shared))
        self.waits = self.reads and not self.drafter.drafts_unread(self.shared)
        cls = type(self.drafter)
        self._alone = cls.propose is SequenceDrafter.propose and cls.observe is SequenceDrafter.observe

    @property
    def drafts(self) -> bool:
        """True if the latest plan was to draft; a drafter that drafts nothing need not read a prompt."""
        return self.plan is None or self.plan.nodes > 0

    def renew(self) -> None:
        """Replace the prepared data, which an interrupt may have left half changed."""
        self.shared, self.plan = self.drafter.renew(self.shared, self.target), None

    def decide(self, members: Seq[Active]) -> None:
        """Plan a step for these sequences."""
        self.plan = None if self.policy is None else self.policy.plan(len(members))
        for active in members:
            sequence = active.sequence
            most = sequence.params.drafts.num_speculative_tokens
            seconds = None if self.plan is None else self.plan.plain_seconds
            sequence.plain_seconds = None if seconds is None else seconds / len(members)
            if self.plan is None:
                sequence.budget, sequence.row_cost, sequence.narrow = most, None, False
            else:
                sequence.budget = self.plan.nodes if most is None else min(most, self.plan.nodes)
                sequence.row_cost, sequence.narrow = self.plan.row_cost, self.plan.narrow

    def calls(self, members: Iterable[Active]) -> list[list[Active]]:
        """The sequences per call to the drafter: one at a time if that is how the drafter works."""
        members = list(members)
        return [[active] for active in members] if self._alone or not members else [members]

    def propose(self, members: Seq[Active]) -> dict[Active, Draft]:
        """Draft for each sequence; the draft is empty if the drafter failed."""
        proposals = dict.fromkeys(members, NOTHING)
        if self.plan is not None and not self.plan.nodes and not self._sure(members):
            return proposals
        for called in self.calls(members):
            try:
                drafts = self.drafter.propose([a.state for a in called])
                proposals.update(zip(called, drafts, strict=True))
            except Exception as error:
                fail(called, error)
        return proposals

    def _sure(self, members: Seq[Active]) -> bool:
        """Plan a draft in a plain step if the policy allows it and the drafter is sure enough."""
        if self.plan is None or self.plan.sure is None or len(members) > 1:
            return False
        sure, active = self.plan.sure, members[0]
        try:
            if self.drafter.promise(active.state) < sure.least:
                return False
        except Exception as error:
            fail(members, error)
            return False
        self.plan = replace(self.plan, nodes=sure.nodes)
        most = active.sequence.params.drafts.num_speculative_tokens
        active.sequence.budget = sure.nodes if most is None else min(most, sure.nodes)
        return True

    def nodes(self, active: Active, draft: Draft) -> int:
        """Number of nodes of a draft that pay by the plan and that the request allows."""
        nodes = len(draft) if self.plan is None else min(len(draft), self.plan.take(draft))
        most = active.sequence.params.drafts.num_speculative_tokens
        return nodes if most is None else min(nodes, most)

    def observe(self, steps: Mapping[Active, Step]) -> None:
        for called in self.calls(steps):
            try:
                self.drafter.observe([a.state for a in called], [steps[a] for a in called])
            except Exception as error:
                fail(called, error)
        for active in steps:
            if active.sequence.stats.steps == _SEEN and active.sequence.error is None:
                self._tell_if_silent(active.sequence)

    def _tell_if_silent(self, sequence: Sequence) -> None:
        """Say once why a drafter that has loaded something has drafted nothing for a text."""
        if sequence.params.drafts.num_speculative_tokens == 0:
            return
        stats, off = sequence.stats, self.plan is not None and not self.plan.nodes
        why = "its drafts cost more than they save, by times measured here" if off else "it proposed none"
        parts = getattr(self.drafter, "parts", None) or (self.drafter,)
        for part in parts:
            nodes = stats.extra.get(f"{part.name}_drafted", 0) if len(parts) > 1 else stats.drafted
            if part.needs and not part.reads_references and not nodes:
                tell(
                    f"{part.name} is loaded and drafted nothing in {_SEEN} steps: {why}; name another drafter"
                )

    def learn(
        self, steps: Mapping[Active, Step], drafting: float, verifying: float | None, per_row: float | None
    ) -> None:
        """Report a step to the policy, which is charged the batch's seconds in proportion to its rows."""
        if self.policy is not None and self.plan is not None and steps:
            sizes = [len(step.draft) for step in steps.values()]
            paths = [step.path for step in steps.values()]
            stated = sum(sum(step.draft.chances or ()) for step in steps.values())
            self.policy.learn(Outcome(self.plan, sizes, paths, drafting, verifying, per_row, stated))


def fail(members: Iterable[Active], error: Exception) -> None:
    """End sequences with an error that the cache or a drafter raised."""
    for active in members:
        active.sequence.fail(error)
        active.doubt |= not isinstance(error, OutpaceError)


def by_drafter(batch: Iterable[Active]) -> dict[Drafting, list[Active]]:
    members: dict[Drafting, list[Active]] = {}
    for active in batch:
        members.setdefault(active.drafting, []).append(active)
    return members


def check_draft(draft: Draft, target: TargetModel) -> None:
    """Refuse a draft with ids that cannot be fed to the target: they would fail the forward of the batch."""
    tokens = draft.tokens
    if len(tokens) and not 0 <= min(tokens) <= max(tokens) < target.vocabulary + target.extra:
        raise OutpaceError(f"the drafter proposes ids outside the model's vocabulary: {list(tokens)}")
