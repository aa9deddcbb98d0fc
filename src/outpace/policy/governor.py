"""Decide how many nodes to draft: pure policy over measured seconds and measured acceptance.

With B sequences in a batch, a_i the chance that node i of a draft is accepted, e_i the chance that there is
such a node, V(r) the seconds of a forward over r rows and D(n) those of drafting n nodes for each sequence,
the governor takes the n with the most tokens per second,

    B (1 + a_1 + ... + a_n) / (V(B) + sum_i e_i (V(B (1 + i)) - V(B i)) + D(n)),

or none where plain decoding, B / (V(B) + D(0)), is faster: Leviathan et al. 2023 (arXiv 2211.17192), theorem
3.8, with measured quantities for assumed ones, and for trees.

What is not drafted is not measured, and texts change. So drafting has an account, in plain steps of time: a
hundredth of all time is paid in, and what drafting gains, up to a limit; what it loses is paid out. While
drafts do not pay, they go on as long as the account lasts, and are tried again when it has enough for a
trial: many texts are easy in places, and hopeless ones lose a hundredth of the time.

Nothing here knows a model, an engine or a clock: the engine asks for a plan and reports the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from outpace.core import Draft, OutpaceError
from outpace.policy.acceptance import Acceptance
from outpace.policy.costs import Costs
from outpace.tree import worthwhile

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

_MARGIN = 1.05  # times its measured seconds that a drafted step is charged: measurements are never exact
_SHARE = 0.01  # of the time that drafting may lose
_SAVINGS = 5.0  # plain steps that the account holds at most, and at first
_REFRESH = 128  # steps after which plain decoding is measured anew while drafts pay
_REVIEW = 16  # steps without a draft after which the best width is worked out again all the same
_SPAN = 16  # nodes over which the cost of a further one is taken
_SAMPLE = 4  # plain steps while drafts are off, of which one is measured


@dataclass(frozen=True)
class Plan:
    """Plan of a step's drafts.

    Attributes:
        nodes: for each sequence at most; 0 for a plain step.
        row_cost: the share of a plain step that each further node takes; None where it was not measured.
    """

    nodes: int
    row_cost: float | None = None

    def take(self, draft: Draft) -> int:
        """The number of nodes of a draft to verify: of one that states chances, as many as pay."""
        if self.row_cost is None or draft.chances is None:
            return self.nodes
        return worthwhile(draft.chances[: self.nodes], self.row_cost)


class Policy(Protocol):
    """Decides before each step of a batch, and hears what became of it.

    Attributes:
        timed: its plans depend on the clock, and are not the same in every run.
    """

    @property
    def timed(self) -> bool: ...

    def plan(self, batch: int) -> Plan:
        """The plan for the next step of a batch of this many sequences."""

    def learn(self, outcome: Outcome) -> None:
        """Take in the outcome of the step that was planned last."""


@dataclass(frozen=True)
class Outcome:
    """One step of a batch, as it was measured.

    Attributes:
        plan: what was planned.
        drafted: nodes of each sequence's draft, at most as many as planned.
        paths: accepted nodes of each sequence's draft.
        draft_seconds: of the drafter: proposing, and learning from the step.
        verify_seconds: of the forward, the verifier and the cache; None where the step did something else
            besides (a prompt's rows went along), so that its seconds say nothing about others.
    """

    plan: Plan
    drafted: Seq[int]
    paths: Seq[Seq[int]]
    draft_seconds: float
    verify_seconds: float | None

    @property
    def rows(self) -> int:
        """Of the forward, which is as wide as the longest draft of the batch."""
        return len(self.paths) * (1 + max(self.drafted))


@dataclass(frozen=True)
class Pinned:
    """Always the same number of nodes.

    Raises:
        OutpaceError: a number below 0.
    """

    nodes: int
    timed: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 0:
            raise OutpaceError(f"a step drafts 0 nodes or more, not {self.nodes}")

    def plan(self, batch: int) -> Plan:
        return Plan(self.nodes)

    def learn(self, outcome: Outcome) -> None:
        pass


class _View(NamedTuple):
    """Statistics of drafts.

    Attributes:
        plain: seconds of a plain step; nan where it was not measured yet.
        width, gain: the width above 0 with the most tokens per second, and that speed over plain decoding's.
        trial: nodes of a step in a trial.
        price: plain steps that it loses if nothing is accepted.
        row_cost: plain steps that a further node takes.
    """

    plain: float = math.nan
    width: int = 0
    gain: float = 0.0
    trial: int = 0
    price: float = 0.0
    row_cost: float = 0.0


class Governor:
    """Drafts as many nodes as pay: see the top of this file.

    Args:
        widths: the numbers of nodes that make sense for the drafter, ascending; None for any. Where they are
            given, a trial is as wide as they go, for they are few and one wide step tells of all.
        ramp: steps in a row from which on the drafter shows what it can do, at least 1.
        drafter: the name that its drafting times are saved under.
        costs: measured forwards, shared with other governors; new ones by default.
    """

    timed = True

    def __init__(
        self,
        widths: Seq[int] | None = None,
        ramp: int = 1,
        drafter: str = "",
        costs: Costs | None = None,
    ) -> None:
        self.widths = WIDTHS if widths is None else tuple(widths)
        if not self.widths or list(self.widths) != sorted({*self.widths} - {0}) or self.widths[0] < 1:
            raise OutpaceError(f"widths are at least one number above 0, ascending, not {self.widths}")
        self._widest = None if widths is None else self.widths[-1]
        if ramp < 1:
            raise OutpaceError(f"a ramp has at least 1 step, not {ramp}")
        self.ramp = ramp
        self.drafter = drafter
        self.acceptance = Acceptance(self.widths)
        self.forwards = Costs() if costs is None else costs
        self.drafting = Costs(slope=0.0)  # of the drafter, over the nodes of all sequences; 0 without a draft
        self._batch, self._step, self._rows = 0, 0, 0  # sequences; steps so far; rows of the latest forward
        self._accounts: dict[int, float] = {}  # octave of the batch -> plain steps
        self._on = False
        self._view, self._viewed = _View(), -_REVIEW  # what is known, and the step that it is of
        self._refresh = 0  # plain steps to come, to measure them

    # -- before a step -----------------------------------------------------------------------------------

    def plan(self, batch: int) -> Plan:
        if batch != self._batch:
            self._on = self._on and batch.bit_length() == self._batch.bit_length()
            self._batch, self._viewed = batch, -_REVIEW
        if self._step - self._viewed >= _REVIEW or not self._view.plain > 0:
            self._view, self._viewed = self.view(batch), self._step
        view = self._view
        if not view.plain > 0:
            return Plan(0)
        self._turn(view)
        if not self._on:
            return Plan(0)
        if self._refresh == 0 and self.forwards.curve(batch).age(batch) > _REFRESH * self.ramp:
            # The first plain step after wide ones is slower than those that follow: only the second counts.
            self._refresh = 2
        if self._refresh:
            self._refresh -= 1
            return Plan(0)
        return Plan(view.width if view.gain > 1 else view.trial, view.row_cost)

    def _turn(self, view: _View) -> None:
        """On while drafts pay or the account lasts; off until it has enough for a trial."""
        account = self._accounts.setdefault(self._batch.bit_length(), _SAVINGS)
        if view.gain > 1:
            self._on = True
        elif self._on:
            self._on = account > 0
        else:
            self._on = account >= min(max(_SAVINGS, view.price), self.ramp * view.price)

    def view(self, batch: int) -> _View:
        """Expected gain of drafts for a batch, by all that was measured."""
        forwards, drafting = self.forwards.curve(batch), self.drafting.curve(batch)
        before = verified = forwards.at(batch)
        knows = bool(drafting)
        idle = drafting.at(0) if knows else 0.0
        plain = before + idle
        best, most = self.widths[0], 0.0
        for width, accepted, there in self.acceptance.expected():
            wide = forwards.at(batch * (1 + width))
            verified += there * (wide - before)
            before = wide
            seconds = verified + (drafting.at(batch * width) if knows else 0.0)
            gain = (1 + accepted) * plain / (_MARGIN * seconds)
            if gain > most:
                best, most = width, gain
            if there < 0.01:
                break
        trial = self._widest or best
        seconds = forwards.at(batch * (1 + trial)) + (drafting.at(batch * trial) if knows else 0.0)
        price = _MARGIN * seconds / plain - 1
        row_cost = (forwards.at(batch * (1 + _SPAN)) - forwards.at(batch)) / (_SPAN * plain)
        return _View(plain, best, most, trial, price, row_cost)

    # -- after a step ------------------------------------------------------------------------------------

    def learn(self, outcome: Outcome) -> None:
        self._step += 1
        batch, rows, nodes = len(outcome.paths), outcome.rows, outcome.plan.nodes
        # Of plain steps in a row, which tell next to nothing new, one in a few is measured.
        if nodes or self._on or not self._view.plain > 0 or not self._step % _SAMPLE:
            # After a forward twice as wide the caches of the machine are cold: such a step is no measure.
            if outcome.verify_seconds is not None and self._rows < 2 * rows:
                self.forwards.add(batch, rows, outcome.verify_seconds)
            self.drafting.add(batch, batch * nodes, outcome.draft_seconds)
        self._rows = rows
        gained = _SHARE
        if nodes:
            if max(outcome.drafted):
                self._viewed = -_REVIEW
            self.acceptance.observe(nodes, outcome.drafted, outcome.paths)
            gained += self._gained(outcome, batch)
        octave = batch.bit_length()
        account = self._accounts.get(octave, _SAVINGS) + gained
        self._accounts[octave] = max(-_SAVINGS, min(_SAVINGS, account))

    def _gained(self, outcome: Outcome, batch: int) -> float:
        """Plain steps that a drafted step has saved, by the seconds that such steps take: this one may have
        been interrupted."""
        plain = self._view.plain
        if not plain > 0:
            return 0.0
        seconds = self.forwards.seconds(batch, outcome.rows)
        seconds += self.drafting.seconds(batch, batch * outcome.plan.nodes)
        if math.isnan(seconds):
            return 0.0
        return 1 + sum(map(len, outcome.paths)) / batch - _MARGIN * seconds / plain

    # -- measured costs ----------------------------------------------------------------------------------

    def again(self) -> Governor:
        """One that begins as this one did, but knows the costs that this one has measured."""
        found = Governor(None if self._widest is None else self.widths, self.ramp, self.drafter)
        found.begin_with(self.costs())
        return found

    def costs(self) -> dict[str, Any]:
        """Measured costs, for a file: seconds over rows, by the number of sequences."""
        return {"verify": self.forwards.dump(), f"draft, {self.drafter}": self.drafting.dump()}

    def begin_with(self, costs: Mapping[str, Any]) -> None:
        """Take measured costs for known, until the same is measured here.

        Raises:
            OutpaceError: they are not what ``costs`` gave.
        """
        try:
            self.forwards.fill(costs["verify"])
            self.drafting.fill(costs.get(f"draft, {self.drafter}", {}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OutpaceError(f"these are no costs of steps ({error!r}); delete the file") from error
