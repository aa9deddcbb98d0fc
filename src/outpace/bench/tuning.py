"""Which drafter, with which options, is the fastest for a model, a machine and a user's prompts.

Measured are the seconds of a step by its width and by the prompts decoded at once, which leaves out drafts
too wide to pay; then every candidate on the same prompts, in rounds of successive halving.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from outpace.bench.candidates import affordable, candidates
from outpace.bench.halving import Halving, Round
from outpace.bench.items import Suite
from outpace.bench.lab.roof import WIDTHS, measure_widths
from outpace.bench.promise import broken
from outpace.bench.rows import Difference, differences_of
from outpace.bench.run import Settings
from outpace.bench.runs import BASELINE
from outpace.bench.subject import Subject
from outpace.bench.ways import Frugal, Goal, Rounds, Way, WaySpeed, method_of
from outpace.core import OutpaceError
from outpace.targets.drift import margin

_CONTEXT = 128  # rows in the cache when steps are measured


@dataclass
class Tuned:
    """What tuning found.

    Attributes:
        way: the choice.
        speed: what to expect of it.
        halving: how it came about, candidates under ``str(way)``.
        steps: seconds of a step: prompts at once -> rows of each -> seconds.
        left_out: ways whose steps take too long to pay.
        taus: tokens per step of every candidate that was measured, under ``str(way)``.
        seconds: that tuning took.
    """

    way: Way
    speed: WaySpeed
    halving: Halving
    steps: dict[int, dict[int, float]]
    left_out: list[Way]
    taus: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Verified:
    """What a choice did on prompts that it was not chosen on.

    Attributes:
        speed: beside plain decoding of the same prompts.
        differences: where its outputs are not plain decoding's.
        broken: whether these break the promise that they are.
    """

    speed: WaySpeed
    differences: tuple[Difference, ...]
    broken: bool


class _TooLittleTime(Exception):
    """The time is up, or somebody wants to stop, before any candidate was asked."""


def tune(
    subject: Subject,
    specs: Seq[str],
    suite: Suite,
    goal: Goal,
    settings: Settings,
    budget: float,
    report: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned | None:
    """Choose a drafter, its options, and of several batches one.

    Args:
        specs: drafters; see ``candidates``.
        suite: prompts to measure on; the first of them should be like the others.
        budget: seconds for all of it.
        report: called before each run, with what is being measured.
        stopped: asked before each run.
        clock: what the budget is read from.

    Returns:
        None if it was stopped.

    Raises:
        OutpaceError: an unknown drafter, or one that does not fit the model; too few prompts; or too little
            time to measure every candidate once.
    """
    began = clock()
    if len(suite.items) < goal.unit:
        raise OutpaceError(
            f"{suite.name} has {len(suite.items)} prompts, and {goal.unit} are decoded at a time; give more "
            "prompts, or another --batch"
        )

    def over() -> bool:
        return stopped() or clock() - began >= budget

    def tick() -> None:
        report("")
        if over():
            raise _TooLittleTime

    found = candidates(specs)
    report("steps")
    try:
        steps = {batch: measure_steps(subject, batch, tick) for batch in goal.batches}
        known = {batch: affordable(found, by_rows) for batch, by_rows in steps.items()}
        ways = [Way(one.spec, batch) for batch in goal.batches for one in known[batch]]
        methods = _methods(subject, ways, settings, tick)
    except _TooLittleTime:
        if stopped():
            return None
        raise OutpaceError(
            f"{budget:g} seconds are not enough to measure this model's steps; give a larger --budget"
        ) from None
    everything = [Way(one.spec, batch) for batch in goal.batches for one in found]
    rounds = Rounds(subject, suite, goal, settings, methods)
    halving = Halving(
        [str(way) for way in ways],
        len(suite.items) // goal.unit,
        budget,
        [str(way) for way in ways if way.spec == BASELINE],
    )
    halving.spend(clock() - began)
    while not over() and (todo := halving.next()) is not None:
        rivals = len(todo.names) - len(halving.baselines)
        report(f"{rivals} candidates left" if rivals > 1 else f"{todo.names[0]} left")
        rounds.run(todo, halving, over, report)
        halving.spend(clock() - began - halving.spent)
    if stopped():
        return None
    if not any(one.measured for one in halving.candidates.values()):
        _explain(halving, budget)
    best = next(way for way in ways if str(way) == halving.best.name)
    left_out = [way for way in everything if way not in ways]
    return Tuned(best, rounds.speed(best), halving, steps, left_out, rounds.taus(), clock() - began)


def _methods(
    subject: Subject, ways: Seq[Way], settings: Settings, before: Callable[[], None]
) -> dict[Way, Frugal]:
    """A method for each way; weights of drafters may have to be read."""
    found = {}
    for way in ways:
        before()
        found[way] = method_of(subject, way, settings)
    return found


def _explain(halving: Halving, budget: float) -> None:
    reasons = [one.failed for one in halving.candidates.values() if one.failed]
    if reasons:
        raise OutpaceError(f"no candidate could be measured: {reasons[0]}")
    raise OutpaceError(
        f"{budget:g} seconds are not enough to measure each of {len(halving.candidates)} candidates once; "
        "give a larger --budget, fewer --drafters, or a smaller --max-new-tokens"
    )


def measure_steps(
    subject: Subject, batch: int, before: Callable[[], None] = lambda: None
) -> dict[int, float]:
    """Seconds of a step over ``batch`` prompts, by the rows of each: 1 row is a plain step.

    Args:
        before: called before each forward; what it raises ends the measurement.
    """
    context = subject.target.context
    room = 2 * max(WIDTHS) if context is None else context
    past = max(1, min(_CONTEXT, room - max(WIDTHS)))
    widths = tuple(width for width in WIDTHS if context is None or past + width <= context)
    return dict(zip(widths, measure_widths(subject.target, past, widths, batch, before), strict=True))


def verify(
    subject: Subject, way: Way, suite: Suite, goal: Goal, settings: Settings, stopped: Callable[[], bool]
) -> Verified | None:
    """How a choice does on other prompts, in turns with plain decoding; None if it was stopped.

    Raises:
        OutpaceError: it failed.
    """
    ways = [Way(BASELINE, way.batch), way] if way.spec != BASELINE else [way]
    rounds = Rounds(
        subject,
        suite,
        replace(goal, batches=(way.batch,)),
        settings,
        {one: method_of(subject, one, settings) for one in ways},
    )
    count = len(suite.items) // way.batch
    halving = Halving([str(one) for one in ways], count, math.inf, [str(one) for one in ways])
    (measured,) = rounds.run(Round(tuple(str(one) for one in ways), 0, count), halving, stopped)
    if stopped():
        return None
    failed = halving.candidates[str(way)].failed
    if failed:
        raise OutpaceError(failed)
    chosen = measured.traces[-1]
    found = differences_of(measured, chosen, lambda text: margin(subject.target, text))
    return Verified(rounds.speed(way), tuple(found), chosen.promised and broken(found, subject.dtype))
