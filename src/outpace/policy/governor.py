"""Governor: the policy that chooses how many nodes to draft, from measured seconds and acceptance.

Let B be the number of sequences in a batch, a_i the probability that node i of a draft is accepted, e_i the
probability that the draft has a node i, V(r) the seconds of a forward over r rows, and D(n) the seconds of
drafting n nodes per sequence. The governor chooses the n with the most tokens per second,

    B (1 + a_1 + ... + a_n) / (V(B) + sum_i e_i (V(B (1 + i)) - V(B i)) + D(n)),

or 0 if plain decoding, B / (V(B) + D(0)), is faster: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8,
extended to trees, with measured instead of assumed quantities.

Acceptance is measured only while drafting, and texts change. Drafting therefore has an account, in units of
plain steps: it is credited with a hundredth of all time and with what drafting gains, up to a limit, and
debited with what drafting loses, down to 0. While drafts do not pay, they continue until the account is
empty, and are tried again once it can pay for a trial. So drafts resume in the easy parts of a text, and a
text that never pays costs a hundredth of the time.

While drafts are off, a drafter that is surer than usual of the next token may draft all the same
(``policy.sure``).

It is independent of models, engines and clocks: the engine requests a plan and reports the outcome
(``plan.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outpace.core import OutpaceError, first_line
from outpace.policy.acceptance import Acceptance
from outpace.policy.costs import Costs
from outpace.policy.plan import DraftPlan, Outcome
from outpace.policy.sure import WIDTHS as SURE_WIDTHS
from outpace.policy.sure import Account, Sure

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

_MARGIN = 1.05  # factor on the measured seconds of a drafted step, since measurements are inexact
_SHARE = 0.01  # share of the time that drafting may lose
_SAVINGS = 5.0  # maximum and initial balance of the account, in plain steps
_REFRESH = 128  # steps after which plain decoding is measured again while drafts pay
_REVIEW = 16  # steps without a draft after which the best width is computed again
_SPAN = 16  # nodes over which the cost of a further node is averaged
_SAMPLE = 4  # while drafts are off, one of this many plain steps is measured


@dataclass(frozen=True)
class Pinned:
    """Policy that always plans the same number of nodes.

    Raises:
        OutpaceError: the number is below 0.
    """

    nodes: int
    timed: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 0:
            raise OutpaceError(f"the number of nodes must be at least 0, not {self.nodes}")

    def plan(self, batch: int) -> DraftPlan:
        return DraftPlan(self.nodes)

    def learn(self, outcome: Outcome) -> None:
        pass


class _View(NamedTuple):
    """Expected speed of drafting, from the measurements so far.

    Attributes:
        plain: seconds of a plain step; nan if not measured yet.
        width, gain: the width above 0 with the most tokens per second, and its speed relative to decoding
            without these drafts.
        trial: nodes per step of a trial.
        price: loss of a trial step in plain steps if nothing is accepted.
        row_cost: time of a further node as a share of a plain step.
    """

    plain: float = math.nan
    width: int = 0
    gain: float = 0.0
    trial: int = 0
    price: float = 0.0
    row_cost: float = 0.0


class Governor:
    """Policy that drafts as many nodes as pay; the module's docstring explains how.

    Args:
        widths: the numbers of nodes that make sense for the drafter, ascending; None for any. If given, a
            trial uses the widest, since they are few and one wide step measures all of them.
        ramp: consecutive drafted steps until the drafter performs at its best, at least 1.
        drafter: the name under which its drafting times are saved.
        costs: measured forwards, shared with other governors; by default a new ``Costs``.
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
            raise OutpaceError(f"widths must be one or more numbers above 0, ascending, not {self.widths}")
        self._widths = widths
        self._widest = None if widths is None else self.widths[-1]
        if ramp < 1:
            raise OutpaceError(f"ramp must be at least 1, not {ramp}")
        self.ramp = ramp
        self.drafter = drafter
        self.acceptance = Acceptance(self.widths)
        self.forwards = Costs() if costs is None else costs
        self.drafting = Costs(slope=0.0)  # drafting time over the nodes of all sequences; 0 nodes: no draft
        self._batch, self._step, self._rows = 0, 0, 0  # sequences; steps so far; rows of the latest forward
        self._accounts: dict[int, float] = {}  # octave of the batch size -> balance in plain steps
        self._on = False
        self._view, self._viewed = _View(), -_REVIEW  # the latest view, and the step it was computed at
        self._refresh = 0  # plain steps left to take as measurements
        self._rival = 1.0  # speed without these drafts, relative to plain decoding
        self._sure = Account(_SAVINGS, _SHARE)
        self._offer: DraftPlan | None = None  # plan of a plain step, computed with the latest view

    # -- before a step -----------------------------------------------------------------------------------

    def plan(self, batch: int) -> DraftPlan:
        plan = self._planned(batch)
        if self._on or batch > 1 or not self._view.plain > 0 or self._sure.balance <= 0:
            return plan
        if self._offer is None:
            self._offer = DraftPlan(0, sure=self._offered())
        return self._offer

    def _offered(self) -> Sure:
        """The drafts of a sequence decoded alone that are made while drafts are off."""
        forwards, drafting = self.forwards.curve(1), self.drafting.curve(1)
        without = self._view.plain / self._rival
        seconds = drafting.seconds_at(SURE_WIDTHS[-1]) if drafting else 0.0
        prices = tuple(
            _MARGIN * (forwards.seconds_at(1 + width) + seconds) / without for width in SURE_WIDTHS
        )
        return Sure(prices, self._sure.factor)

    def _planned(self, batch: int) -> DraftPlan:
        if batch != self._batch:
            self._on = self._on and batch.bit_length() == self._batch.bit_length()
            self._batch, self._viewed = batch, -_REVIEW
        if self._step - self._viewed >= _REVIEW or not self._view.plain > 0:
            self._view, self._viewed, self._offer = self.view(batch), self._step, None
        view = self._view
        if not view.plain > 0:
            return DraftPlan(0)
        self._turn(view)
        if not self._on:
            return DraftPlan(0)
        if self._refresh == 0 and self.forwards.curve(batch).age(batch) > _REFRESH * self.ramp:
            # The first plain step after wide ones is slower than later ones, so only the second is used.
            self._refresh = 2
        if self._refresh:
            self._refresh -= 1
            return DraftPlan(0)
        nodes = view.width if view.gain > 1 else view.trial
        return DraftPlan(nodes, view.row_cost, plain_seconds=view.plain)

    def _turn(self, view: _View) -> None:
        """Switch drafting on while drafts pay or the account lasts, off until it can pay for a trial."""
        account = self._balance(self._batch.bit_length())
        if view.gain > 1:
            self._on = True
        elif self._on:
            self._on = account > 0
        else:
            self._on = account >= min(max(_SAVINGS, view.price), self.ramp * view.price)

    def _balance(self, octave: int) -> float:
        """The account of an octave of batch sizes; a new one begins with that of the next smaller batches.

        The larger the batch, the more rows cost relative to a plain step. So what does not pay in a small
        batch does not pay in a larger one, and a batch that grows pays for no trial at each octave.
        """
        if octave not in self._accounts:
            smaller = [known for known in self._accounts if known < octave]
            self._accounts[octave] = self._accounts[max(smaller)] if smaller else _SAVINGS
        return self._accounts[octave]

    def view(self, batch: int) -> _View:
        """Compute the expected gain of drafting for a batch size from the measurements so far."""
        forwards, drafting = self.forwards.curve(batch), self.drafting.curve(batch)
        before = verified = forwards.seconds_at(batch)
        knows = bool(drafting)
        idle = drafting.seconds_at(0) if knows else 0.0
        plain = before + idle
        without = plain / self._rival
        best, most = self.widths[0], 0.0
        for width, accepted, there in self.acceptance.expected():
            wide = forwards.seconds_at(batch * (1 + width))
            verified += there * (wide - before)
            before = wide
            seconds = verified + (drafting.seconds_at(batch * width) if knows else 0.0)
            gain = (1 + accepted) * without / (_MARGIN * seconds)
            if gain > most:
                best, most = width, gain
            if there < 0.01:
                break
        trial = self._widest or best
        seconds = forwards.seconds_at(batch * (1 + trial)) + (
            drafting.seconds_at(batch * trial) if knows else 0.0
        )
        price = _MARGIN * seconds / without - 1
        row_cost = (forwards.seconds_at(batch * (1 + _SPAN)) - forwards.seconds_at(batch)) / (_SPAN * plain)
        return _View(plain, best, most, trial, price, row_cost)

    # -- after a step ------------------------------------------------------------------------------------

    def learn(self, outcome: Outcome) -> None:
        if outcome.row_seconds is not None:
            self.forwards.set_floor(outcome.row_seconds)
        batch, rows, nodes = len(outcome.paths), outcome.rows, outcome.plan.nodes
        # Consecutive plain steps add little information, so only one in `_SAMPLE` is measured.
        if nodes or self._on or not self._view.plain > 0 or not self._step % _SAMPLE:
            # After a forward twice as wide the processor's caches are cold, so the step is not measured.
            if outcome.verify_seconds is not None and self._rows < 2 * rows:
                self.forwards.add(batch, rows, outcome.verify_seconds)
            self.drafting.add(batch, batch * nodes, outcome.draft_seconds)
        gained = 0.0
        if nodes and outcome.plan.sure is not None:
            self._sure.count(self._gained(outcome, batch))
            self._offer = None
            if max(outcome.drafted):
                self._sure.observe(outcome.stated, sum(map(len, outcome.paths)))
        elif nodes:
            if max(outcome.drafted):
                self._viewed = -_REVIEW
            self.acceptance.observe(nodes, outcome.drafted, outcome.paths)
            gained = self._gained(outcome, batch)
        if outcome.plan.sure is None or not nodes:
            self._sure.count()
            self._sure.forget()
        self._count(outcome, gained)

    def _count(self, outcome: Outcome, gained: float) -> None:
        """Count a step, and credit the account with the step's share of time and what drafts gained."""
        self._step += 1
        self._rows = outcome.rows
        octave = len(outcome.paths).bit_length()
        account = self._balance(octave) + _SHARE + gained
        self._accounts[octave] = max(0.0, min(_SAVINGS, account))

    def _gained(self, outcome: Outcome, batch: int) -> float:
        """Plain steps saved by a drafted step, by the measured costs of such steps."""
        without = self._view.plain / self._rival
        if not without > 0:
            return 0.0
        seconds = self._cost(outcome, batch) + self.drafting.seconds(batch, batch * outcome.plan.nodes)
        if math.isnan(seconds):
            return 0.0
        return 1 + sum(map(len, outcome.paths)) / batch - _MARGIN * seconds / without

    def _cost(self, outcome: Outcome, batch: int) -> float:
        """Seconds of a step's forward, by the measured costs.

        The step's own time may include an interruption. It counts only if it is longer than what is assumed
        of a width not measured yet; otherwise a trial whose every step has another width would seem cheap.
        """
        seconds = self.forwards.seconds(batch, outcome.rows)
        if self.forwards.curve(batch).age(outcome.rows) == math.inf:
            seconds = max(seconds, outcome.verify_seconds or 0.0)
        return seconds

    # -- measured costs ----------------------------------------------------------------------------------

    def again(self) -> Governor:
        """A new governor with the same options that begins with the costs measured by this one."""
        found = Governor(self._widths, self.ramp, self.drafter)
        found.begin_with(self.costs())
        return found

    def costs(self) -> dict[str, Any]:
        """Measured costs, for a file: seconds over rows, by number of sequences."""
        return {"verify": self.forwards.dump(), f"draft, {self.drafter}": self.drafting.dump()}

    def begin_with(self, costs: Mapping[str, Any]) -> None:
        """Import measured costs, used until the same widths are measured here.

        Raises:
            OutpaceError: the table does not have the format of ``costs``.
        """
        try:
            self.forwards.fill(costs["verify"])
            self.drafting.fill(costs.get(f"draft, {self.drafter}", {}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OutpaceError(
                f"the measured costs cannot be read ({first_line(error)}); delete the file"
            ) from error


class FullOrNarrow(Governor):
    """Governor of a drafter that can leave out the nodes that pay only in later steps.

    A second governor plans the narrow drafts, those without such nodes. Full drafts have to gain over what
    narrow ones reach, not only over plain decoding, and are tried once that is measured.

    Args:
        narrow: the widths of narrow drafts, ascending.
        widths, ramp, drafter, costs: those of full drafts, as in ``Governor``.
    """

    def __init__(
        self,
        narrow: Seq[int],
        widths: Seq[int] | None = None,
        ramp: int = 1,
        drafter: str = "",
        costs: Costs | None = None,
    ) -> None:
        super().__init__(widths, ramp, drafter, costs)
        self.narrow = Governor(narrow, costs=self.forwards)
        self.narrow.drafting = self.drafting

    def plan(self, batch: int) -> DraftPlan:
        if self._step >= _REVIEW:
            self._rival = max(1.0, self.narrow._view.gain)
            plan = super().plan(batch)
            if plan.nodes:
                return plan
        return replace(self.narrow.plan(batch), narrow=True)

    def learn(self, outcome: Outcome) -> None:
        if outcome.plan.narrow:
            self.narrow.learn(outcome)
            self._count(outcome, 0.0)
        else:
            super().learn(outcome)
            self.narrow._count(outcome, 0.0)

    def _gained(self, outcome: Outcome, batch: int) -> float:
        # Full drafts contain the guesses of narrow ones, so they lose at most their additional time: an
        # estimate with less noise than the few steps of a trial.
        narrow = self.narrow._view
        rows = batch * (1 + (narrow.width if narrow.gain > 1 else 0))
        further = self._cost(outcome, batch) - self.forwards.seconds(batch, rows)
        gained = super()._gained(outcome, batch)
        return max(gained, -_MARGIN * further * self._rival / self._view.plain)

    def again(self) -> FullOrNarrow:
        found = FullOrNarrow(self.narrow.widths, self._widths, self.ramp, self.drafter)
        found.begin_with(self.costs())
        return found
