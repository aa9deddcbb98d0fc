"""Selection of the fastest drafter and its options for a model, a machine and a user's prompts.

The benchmark decodes the prompts with all candidates, interleaved, and drops slow ones along the way. Their
number falls evenly on a logarithmic scale, from all of them at the start to one at the end of the time:
successive halving (Karnin, Koren, Somekh 2013, *Almost Optimal Exploration in Multi-Armed Bandits*; Jamieson,
Talwalkar 2016, arXiv 1502.07943) with a step after every prompt. The time spent is the same for each halving
of the number of candidates, so the closest ones at the end are measured most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from outpace.bench.items import Suite
from outpace.bench.ours import Ours
from outpace.bench.rows import Row, rows_of
from outpace.bench.run import Measured, MethodRuns, Settings, measure
from outpace.bench.runs import BASELINE, MethodRun, PromptBatch
from outpace.core import OutpaceError
from outpace.engine.parts import Adaptive
from outpace.loading import Loaded
from outpace.targets.ties import margin_of
from outpace_lab.bench.candidates import Candidate, affordable, candidates
from outpace_lab.bench.roof import WIDTHS, measure_widths, wait
from outpace_lab.names import LATENCY, THROUGHPUT, check_known

_CONTEXT = 128  # rows in the cache when steps are measured


@dataclass(frozen=True)
class Goal:
    """Aim of the tuning.

    Attributes:
        objective: ``throughput``, tokens per second of all prompts together, or ``latency``, tokens per
            second of one of them.
        batches: batch sizes to compare; the best one is chosen.
    """

    objective: str = THROUGHPUT
    batches: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        check_known("objective", self.objective, (THROUGHPUT, LATENCY))
        if self.objective == LATENCY and len(self.batches) > 1:
            raise OutpaceError(
                "latency is tuned for one batch size; give one --batch, that of the intended use"
            )

    def seconds(self, run: MethodRun) -> float:
        """Seconds of a run according to the objective."""
        return run.seconds if self.objective == THROUGHPUT else sum(run.last_seconds)

    def rows(self, measured: Measured, margin: Callable[[Seq[int], Seq[int]], float]) -> list[Row]:
        """Compute a row per method, with seconds according to the objective."""
        for trace in measured.traces:
            trace.runs = [
                [[replace(run, seconds=self.seconds(run)) for run in turns] for turns in repeats]
                for repeats in trace.runs
            ]
        return rows_of(measured, margin)


class Way(NamedTuple):
    """A drafter's spec and a batch size."""

    spec: str
    batch: int

    def __str__(self) -> str:
        return self.spec if self.batch == 1 else f"{self.spec}, {self.batch} at once"


@dataclass(frozen=True)
class Tuned:
    """Result of tuning.

    Attributes:
        way: the choice.
        rows: figures of each candidate, including plain decoding; a failed one has an error.
        steps: batch size -> rows per prompt -> seconds of a step.
        left_out: candidates omitted because their steps take too long to pay.
        seconds: duration of tuning.
    """

    way: Way
    rows: dict[Way, Row]
    steps: dict[int, dict[int, float]]
    left_out: list[Way]
    seconds: float

    @property
    def row(self) -> Row:
        """Expected figures of the choice."""
        return self.rows[self.way]


class Frugal(Ours):
    """A drafter whose engine holds a cache only while it decodes, so that many fit into memory together.

    The cache for a run is allocated before its time is measured.
    """

    def __init__(
        self, subject: Loaded, spec: str, temperature: float = 0.0, adaptive: Adaptive = "auto"
    ) -> None:
        try:
            super().__init__(subject.target, spec, adaptive=adaptive, temperature=temperature)
        except OutpaceError as error:
            raise type(error)(f"{spec}: {error}") from None
        self._device = subject.device
        self._engine.make_room(1, 1)

    def begin(self, anew: bool = False) -> None:
        """Make a new engine, with a minimal cache."""
        super().begin(anew)
        self._engine.make_room(1, 1)

    def run(self, request: PromptBatch) -> MethodRun:
        """Decode step by step."""
        longest = max(map(len, request.prompts))
        self._engine.make_room(len(request.prompts), longest + request.max_new_tokens + 64)
        wait(self._device)
        try:
            return super().run(request)
        finally:
            self._engine.make_room(1, 1)


class _Over(Exception):
    """The time is up, or the user wants to stop."""


@dataclass(frozen=True)
class _Watch:
    """The clock, and callbacks to report progress and to check for a stop."""

    report: Callable[[str], None]
    stopped: Callable[[], bool]
    clock: Callable[[], float]

    def over(self, deadline: float) -> bool:
        """Return True if measuring must stop; called before each run."""
        self.report("")
        return self.stopped() or self.clock() >= deadline

    def check(self, deadline: float) -> None:
        """Raise ``_Over`` if measuring must stop."""
        if self.over(deadline):
            raise _Over


def tune(
    subject: Loaded,
    specs: Seq[str],
    suite: Suite,
    goal: Goal,
    settings: Settings,
    budget: float,
    report: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned | None:
    """Choose a drafter, its options, and one of several batch sizes.

    Args:
        specs: drafters; see ``candidates``.
        suite: prompts to measure on; the first ones should be representative.
        budget: total seconds; what remains after measuring the steps is divided equally among batch sizes.
        report: called with a description of the current measurement, and with "" before each run.
        stopped: called before each run; True ends tuning.
        clock: function that returns the time in seconds.

    Returns:
        None if it was stopped.

    Raises:
        OutpaceError: a drafter is unknown or does not fit the model, there are too few prompts, or there is
            too little time to measure every candidate once.
    """
    began = clock()
    most = max(goal.batches)
    if len(suite.items) < most:
        raise OutpaceError(
            f"{suite.name} has {len(suite.items)} prompts, and {most} are decoded at a time; give more "
            "prompts, or another --batch"
        )

    watch = _Watch(report, stopped, clock)
    found = candidates(specs)
    rows: dict[Way, Row] = {}
    left_out: list[Way] = []
    doing = "this model's steps"
    try:
        report("steps")
        check = partial(watch.check, began + budget)
        steps = {batch: measure_steps(subject, batch, check) for batch in goal.batches}
        for place, batch in enumerate(goal.batches):
            fit = affordable(found, steps[batch])
            left_out += [Way(one.spec, batch) for one in found if one not in fit]
            doing = f"each of {len(fit)} candidates once"
            deadline = clock() + (began + budget - clock()) / (len(goal.batches) - place)
            measured = _race(subject, fit, suite, Goal(goal.objective, (batch,)), settings, watch, deadline)
            rows |= {
                Way(row.drafter, batch): row for row in goal.rows(measured, lambda asked, output: math.nan)
            }
    except _Over:
        if stopped():
            return None
        raise OutpaceError(
            f"{budget:g} seconds are not enough to measure {doing}; give a larger --budget, fewer "
            "--drafters, or a smaller --max-new-tokens"
        ) from None
    if stopped():
        return None
    # Per batch size, only candidates measured to the end: the others were slower on the same prompts.
    end = {batch: rows[Way(BASELINE, batch)].prompts for batch in goal.batches}
    last = {way: row.speed for way, row in rows.items() if row.speed and row.prompts == end[way.batch]}
    best = max(last, key=lambda way: last[way].tokens_per_second)
    return Tuned(best, rows, steps, left_out, clock() - began)


def _race(
    subject: Loaded,
    fit: Seq[Candidate],
    suite: Suite,
    goal: Goal,
    settings: Settings,
    watch: _Watch,
    deadline: float,
) -> Measured:
    """Measure candidates until two remain and time or prompts are used up, for a goal of one batch size.

    Raises:
        _Over: time was up before every candidate had decoded a group of prompts. OutpaceError: plain decoding
            failed.
    """
    watch.report(f"{len(fit) - 1} candidates")
    methods = []
    for one in fit:
        watch.check(deadline)  # weights of drafters may have to be read
        methods.append(Frugal(subject, one.spec, settings.temperature))
    (batch,) = goal.batches
    groups = len(suite.items) // batch
    whole = replace(suite, items=suite.items[: groups * batch])
    race = _Race(goal, groups, len(fit) - 1, watch, deadline)
    measured = measure(subject, methods, whole, batch, settings, race.advance, partial(watch.over, deadline))
    if not measured.groups:
        raise _Over
    return measured


@dataclass
class _Race:
    """The rule by which candidates are dropped.

    Attributes:
        groups: number of groups of prompts in the suite.
        rivals: number of candidates at the start, without plain decoding, which always stays as baseline.
        deadline: end of the race, in the watch's time.
        spent: seconds of all runs so far.
    """

    goal: Goal
    groups: int
    rivals: int
    watch: _Watch
    deadline: float
    spent: float = 0.0

    def advance(self, measured: Measured) -> None:
        """Drop the slowest after a group of prompts; two stay until time or prompts are used up."""
        racing = [trace for trace in measured.traces[1:] if trace.active]
        self.spent += sum(run.seconds for trace in (measured.traces[0], *racing) for run in trace.runs[-1][0])
        used = self.spent / (self.spent + max(0.0, self.deadline - self.watch.clock()))
        # If prompts are scarcer than time: n candidates remain after groups / n groups.
        keep = math.ceil(min(self.rivals ** (1 - used), self.groups / len(measured.groups)))
        racing.sort(key=self._speed, reverse=True)
        for trace in racing[keep:]:
            trace.left = True
        count = min(keep, len(racing))
        self.watch.report(f"{count} candidates left" if count != 1 else f"{racing[0].name} left")

    def _speed(self, trace: MethodRuns) -> float:
        runs = [run for repeats in trace.runs for run in repeats[0]]
        return sum(run.tokens for run in runs) / sum(map(self.goal.seconds, runs))


def measure_steps(subject: Loaded, batch: int, before: Callable[[], None] = lambda: None) -> dict[int, float]:
    """Measure the seconds of a step over ``batch`` prompts by the rows per prompt; 1 row is a plain step.

    Args:
        before: called before each forward; an exception it raises ends the measurement.
    """
    context = subject.target.context
    room = 2 * max(WIDTHS) if context is None else context
    past = max(1, min(_CONTEXT, room - max(WIDTHS)))
    widths = tuple(width for width in WIDTHS if context is None or past + width <= context)
    return dict(zip(widths, measure_widths(subject.target, past, widths, batch, before), strict=True))


def verify(
    subject: Loaded, way: Way, suite: Suite, goal: Goal, settings: Settings, stopped: Callable[[], bool]
) -> Row | None:
    """Measure a choice on other prompts, interleaved with plain decoding.

    Returns:
        Its row; None if it was stopped.

    Raises:
        OutpaceError: it failed.
    """
    specs = dict.fromkeys((BASELINE, way.spec))
    methods = [Frugal(subject, spec, settings.temperature) for spec in specs]
    part = replace(suite, items=suite.items[: len(suite.items) // way.batch * way.batch])
    measured = measure(subject, methods, part, way.batch, settings, stopped=stopped)
    if stopped():
        return None
    row = goal.rows(measured, partial(margin_of, subject.target))[-1]
    if row.error is not None:
        raise OutpaceError(f"{way}: {row.error}")
    return row
