"""How many nodes to draft: pure policy over measured seconds and measured acceptance.

A drafted node is worth its row only if the time it saves by being accepted is more than the time it takes.
With B sequences in a batch, a_i the chance that node i of a draft stands, e_i the chance that there is such
a node, V(r) the seconds of a forward over r rows and D(n) those of drafting n nodes for each sequence, the
governor takes the n with the most tokens per second,

    B (1 + a_1 + ... + a_n) / (V(B) + sum_i e_i (V(B (1 + i)) - V(B i)) + D(n)),

or none where plain decoding, B / V(B), is faster: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8, with
measured quantities for assumed ones, and for trees. A drafter is on while its drafts pay, and a little
longer: some of the time that it has gained may be lost again before it is turned off, for many texts are easy
in places. It is off else, and then tried for a step or a few from time to time: later and later while that is
in vain, and, once what it had gained is spent, never so often that the trials take more than a hundredth of
the time. A drafter that costs little is asked more often for a draft that nobody verifies: the plain step
tells whether its first token was right. So it comes back when the text changes.

Nothing here knows a model, an engine or a clock: whoever steps asks for a plan and tells the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from outpace.core import OutpaceError
from outpace.policy.acceptance import Acceptance
from outpace.policy.costs import Costs, Curve

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

_FIRST, _CEILING = 4, 64  # steps from a vain trial to the next, at first and at most
_SHARE, _PEEKED_SHARE = 0.01, 0.005  # of the time, that vain trials may take; where there are peeks
_ALLOWANCE = 10.0  # plain steps that one trial may lose
_SAVINGS = 5.0  # plain steps of the time gained that may be lost again, half of them before it is turned off
_BARREN, _GLANCE = 8, 2  # steps of a trial without any draft, after which it is over; where there are peeks
_PAYS = 1.05  # speed over plain decoding from which on drafting is worth it: measurements are never exact
_RETURN = 1.1  # speed over plain decoding, measured before, at which a drafter that is off is tried at once
_REFRESH = 128  # steps after which plain decoding is measured anew
_REVIEW = 16  # steps without a draft after which the best width is worked out again all the same
_SWEEP = 8  # steps from one clearing out of old measurements to the next
_SAMPLE = 4  # plain steps between trials, of which one is measured
_PEEK, _PEEKS = 0.004, 4  # of the time, that drafts not verified may take; steps between them at least


@dataclass(frozen=True)
class Plan:
    """What a step drafts.

    Attributes:
        nodes: for each sequence; 0 for a plain step.
        verified: False to ask for drafts, compare their first tokens with what a plain step emits, and do no
            more with them.
    """

    nodes: int
    verified: bool = True


class Policy(Protocol):
    """Decides before each step of a batch, and hears what became of it.

    Attributes:
        timed: its plans depend on the clock, and are not the same in every run.
    """

    @property
    def timed(self) -> bool: ...

    def plan(self, batch: int) -> Plan:
        """What to draft for each of so many sequences."""

    def learn(self, outcome: Outcome) -> None:
        """What became of the step that was planned last."""


@dataclass(frozen=True)
class Outcome:
    """One step of a batch, as it was measured.

    Attributes:
        plan: what was planned.
        drafted: nodes of each sequence's draft, at most as many as planned.
        paths: accepted nodes of each sequence's draft; of one not verified, its first node if it was right.
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
        return len(self.paths) * (1 + (max(self.drafted) if self.plan.verified else 0))


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


class _Mode(Enum):
    OFF = "plain steps; the next trial in so many of them"
    TRIAL = "drafting, to see whether it pays"
    ON = "drafting, because it pays"


class Governor:
    """Drafts as many nodes as pay: see the top of this file.

    Args:
        widths: the numbers of nodes that make sense for the drafter, ascending; None for any. Where they are
            given, a trial is as wide as they go, for they are few and one wide step tells of all.
        ramp: steps in a row from which on the drafter shows what it can do, at least 1.
        drafter: what its drafting times are saved under.
    """

    timed = True

    def __init__(self, widths: Seq[int] | None = None, ramp: int = 1, drafter: str = "") -> None:
        self.widths = WIDTHS if widths is None else tuple(widths)
        if not self.widths or list(self.widths) != sorted({*self.widths} - {0}) or self.widths[0] < 1:
            raise OutpaceError(f"widths are at least one number above 0, ascending, not {self.widths}")
        self._widest = None if widths is None else self.widths[-1]
        if ramp < 1:
            raise OutpaceError(f"a ramp has at least 1 step, not {ramp}")
        self.ramp = ramp
        self.drafter = drafter
        self.acceptance = Acceptance(self.widths)
        self._verify = Costs()
        self._draft = Costs(slope=0.0)
        self._idle = Curve(slope=0.0)  # of the drafter in steps it does not draft for, over sequences
        self._step = 0
        self._rows = 0  # of the latest forward
        self._batch, self._entered = 0, 0  # sequences, and the step from which on there were as many
        self._mode = _Mode.OFF
        self._wait, self._pause = 0, _FIRST  # steps to the next trial, and between trials
        self._waits: dict[int, int] = {}  # steps to the next trial of other batches, by their octave
        self._left, self._barren, self._lost = 0, 0, 0.0  # of a trial: steps, those without a draft, seconds
        self._tried = 0  # sequences that the latest began with
        self._saved = 0.0  # plain steps of the time gained that may be lost again
        # The best width and its gain, whether a draft has told more of them since, and when they were found.
        self._choice, self._told, self._reviewed = (self.widths[0], 0.0), True, 0
        self._measured = False  # whether a plain step was, not counting the first
        self._refresh = 0  # plain steps to come, to measure them
        # While off: steps from one look to the next, and whether drafts are asked for then.
        self._every, self._peeks = _SWEEP, False

    # -- before a step -----------------------------------------------------------------------------------

    def plan(self, batch: int) -> Plan:
        if batch != self._batch:
            self._enter(batch)
        elif self._mode is _Mode.OFF and self._wait > 0 and self._step % self._every:
            return Plan(0)  # between trials little changes: not worth the arithmetic in every step
        if not self._known(batch):
            return Plan(0)
        if self._undecided():
            self._choice, self._told, self._reviewed = self.best(batch), False, self._step
        width, gain = self._choice
        self._turn(gain)
        if self._mode is _Mode.OFF:
            return Plan(1, verified=False) if self._peeks else Plan(0)
        if self._mode is _Mode.ON and self._outdated(batch):
            # The first plain step after wide ones is slower than those that follow: only the second counts.
            self._refresh = 2
        if self._refresh:
            self._refresh -= 1
            return Plan(0)
        return Plan(self._widest or width if self._mode is _Mode.TRIAL else width)

    def _undecided(self) -> bool:
        """Whether the best width has to be worked out again: it may be another by now."""
        ends = self._mode is _Mode.TRIAL and self._over()
        return self._told or ends or self._step - self._reviewed >= _REVIEW

    def _enter(self, batch: int) -> None:
        """Other sequences than before. What was in vain with many may pay with few, so they wait apart."""
        before, now = self._batch.bit_length(), batch.bit_length()
        if now != before:
            self._waits[before] = self._wait
            self._wait = self._waits.get(now, min(self._wait, self._pause))
        self._batch, self._entered, self._told = batch, self._step, True

    def best(self, batch: int) -> tuple[int, float]:
        """The width above 0 with the most tokens per second, and that speed over plain decoding's."""
        verify, draft = self._verify.curve(batch), self._draft.curve(batch)
        before = verified = verify.at(batch)
        plain = before + self._idling(batch)
        best, most = self.widths[0], 0.0
        for width, stand, there in self.acceptance.expected():
            wide = verify.at(batch * (1 + width))
            verified += there * (wide - before)
            before = wide
            seconds = verified + (draft.at(batch * width) if draft else 0.0)
            gain = (1 + stand) * plain / seconds
            if gain > most:
                best, most = width, gain
            if there < 0.01:
                break
        return best, most

    def _known(self, batch: int) -> bool:
        """Whether a plain step's seconds are: measured twice, for the first is slow, or borrowed then."""
        curve = self._verify.curve(batch)
        cell = curve.cell(batch)
        if cell is not None and len(cell):
            self._measured = True
        return self._measured and bool(curve)

    def _outdated(self, batch: int) -> bool:
        cell = self._verify.curve(batch).cell(batch)
        measured = max(self._entered, cell.last if cell is not None else 0)
        return not self._refresh and self._step - measured > _REFRESH * self.ramp

    def _idling(self, batch: int) -> float:
        return self._idle.at(batch) if self._idle else 0.0

    def _turn(self, gain: float) -> None:
        """On, off, or to a trial, by the speed over plain decoding that drafting promises."""
        if self._mode is _Mode.ON and gain <= 1 and self._saved <= _SAVINGS / 2:
            self._stop()
        elif self._mode is _Mode.TRIAL and self._over():
            if gain > _PAYS:
                self._mode = _Mode.ON
            elif gain > 1 or self._lost >= 0:
                self._stop()
        if self._mode is _Mode.OFF and (self._wait <= 0 or gain > _RETURN):
            self._mode, self._tried = _Mode.TRIAL, self._batch
            # The more trials were in vain, the shorter they are.
            self._left = max(self.ramp, _FIRST * _FIRST // self._pause)
            # Where nobody looks between trials, a trial waits longer for a draft.
            self._barren, self._lost = _GLANCE if self._peeks else _BARREN, 0.0

    def _over(self) -> bool:
        plain = self._verify.curve(self._batch).at(self._batch)
        # A trial that few sequences began would cost many too much.
        crowded = self._batch > 2 * self._tried
        return crowded or self._left <= 0 or self._barren <= 0 or self._lost > _ALLOWANCE * plain

    def _stop(self) -> None:
        """Off. The next trial is soon if drafting paid until now, else later than the last."""
        if self._mode is _Mode.ON and self._lost < 0:
            self._wait = self._pause = _FIRST
        else:
            plain = self._verify.curve(self._batch).at(self._batch)
            if self._barren > 0:
                self._pause = min(2 * self._pause, _CEILING)
            self._wait = self._pause
            if self._saved <= 0:
                share = _PEEKED_SHARE if self._peeks else _SHARE
                self._wait = max(self._pause, math.ceil(self._lost / (share * plain)))
        self._mode = _Mode.OFF
        self.acceptance.loosen()
        self._look()

    def _look(self) -> None:
        """How often to look at what is off: as often as asking for a draft costs next to nothing."""
        draft = self._draft.curve(self._batch)
        plain = self._verify.curve(self._batch).at(self._batch)
        self._every, self._peeks = _SWEEP, False
        if self._widest is None and self.ramp == 1 and draft:
            every = math.ceil((draft.at(self._batch) - self._idling(self._batch)) / (_PEEK * plain))
            if every <= _CEILING:
                self._every, self._peeks = max(_PEEKS, every), True

    # -- after a step ------------------------------------------------------------------------------------

    def learn(self, outcome: Outcome) -> None:
        self._step += 1
        self._told = self._told or max(outcome.drafted) > 0
        batch, rows = len(outcome.paths), outcome.rows
        if self._resting(outcome):
            self._wait -= 1
            self._rows = rows
            return
        if outcome.verify_seconds is not None:
            # After one twice as wide the caches of the machine are cold: not what such steps take in a row.
            after_wide = self._rows >= 2 * rows
            self._verify.curve(batch).add(rows, outcome.verify_seconds, self._step, borrowed=after_wide)
            if outcome.plan.nodes:
                self._draft.curve(batch).add(batch * outcome.plan.nodes, outcome.draft_seconds, self._step)
            else:
                self._idle.add(batch, outcome.draft_seconds, self._step)
        self._rows = rows
        if outcome.plan.nodes:
            self.acceptance.observe(outcome.plan.nodes, outcome.drafted, outcome.paths)
        if outcome.plan.nodes and outcome.plan.verified:
            self._account(outcome, batch)
        elif self._mode is _Mode.OFF:
            self._wait -= 1
        if self._step % _SWEEP == 0:
            self._verify.curve(batch).forget(self._step, keep=batch)
            self._draft.curve(batch).forget(self._step, keep=batch * outcome.plan.nodes)

    def _resting(self, outcome: Outcome) -> bool:
        """Whether a step tells next to nothing: a plain one among many such. The arithmetic takes longer."""
        if self._mode is not _Mode.OFF or outcome.plan.nodes or not self._step % _SAMPLE:
            return False
        return self._measured and self._step - self._entered > _SWEEP

    def _account(self, outcome: Outcome, batch: int) -> None:
        """What drafting has lost since it was last turned on, against plain steps to the same tokens."""
        if max(outcome.drafted):
            self._left -= 1
        else:
            self._barren -= 1
        verify, draft = self._verify.curve(batch), self._draft.curve(batch)
        plain = verify.at(batch) + self._idling(batch)
        if not math.isnan(plain):
            # Seconds as such steps take, not as this one took: it may have been interrupted.
            seconds = verify.at(outcome.rows)
            if draft:
                seconds += draft.at(batch * outcome.plan.nodes)
            lost = seconds - plain * (1 + sum(map(len, outcome.paths)) / batch)
            self._lost += lost
            self._saved = min(_SAVINGS, max(0.0, self._saved - lost / plain))

    # -- measured costs ----------------------------------------------------------------------------------

    def again(self) -> Governor:
        """One that begins as this one did, but knows the costs that this one has measured."""
        found = Governor(None if self._widest is None else self.widths, self.ramp, self.drafter)
        found.begin_with(self.costs())
        return found

    def costs(self) -> dict[str, Any]:
        """What was measured, for ``save_costs``: seconds over rows, by the number of sequences."""
        return {"verify": self._verify.dump(), f"draft, {self.drafter}": self._draft.dump()}

    def begin_with(self, costs: Mapping[str, Any]) -> None:
        """Take measured costs for known, until the same is measured anew.

        Raises:
            OutpaceError: they are not what ``costs`` gave.
        """
        try:
            self._verify.fill(costs["verify"])
            self._draft.fill(costs.get(f"draft, {self.drafter}", {}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OutpaceError(f"these are no costs of steps ({error!r}); delete the file") from error
