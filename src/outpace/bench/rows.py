"""The figures of a method on a suite, as pure functions of the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from outpace.bench.run import Measured, MethodRuns
from outpace.bench.runs import MethodRun
from outpace.bench.speed import Sample, Speed, samples_of, speed_of, speed_of_categories
from outpace.bench.statistics import ratio, repeated_4grams
from outpace.core import Promise
from outpace.targets.ties import parting


@dataclass(frozen=True)
class Latency:
    """Milliseconds between the tokens of an answer, and per iteration of the decoding loop.

    Tokens of one step arrive together: the first after the step's time, the others after none. The time
    before an answer's first token is not included. An iteration drafts, verifies and emits, for all answers
    at once (Chen et al. 2023, figure 1).

    Attributes:
        mean, variance: mean and variance of the times between tokens; the variance in square milliseconds.
        p50, p90, p99: their percentiles.
        loop, loop_variance: mean and variance of the iterations after the first.
    """

    mean: float
    variance: float
    p50: float
    p90: float
    p99: float
    loop: float
    loop_variance: float


def latency_of(runs: Seq[MethodRun]) -> Latency | None:
    """Compute the latency over all answers of all runs; None if arrivals are unknown or all simultaneous."""
    if not all(run.token_seconds for run in runs):
        return None
    answers = [times for run in runs for times in run.token_seconds]
    # Every iteration emits at least one token, so the arrival times are the ends of the iterations.
    turns = [sorted({moment for times in run.token_seconds for moment in times}) for run in runs]
    gaps, loops = _apart(answers), _apart(turns)
    if not len(loops):
        return None
    p50, p90, p99 = np.percentile(gaps, (50, 90, 99))
    return Latency(
        mean=float(gaps.mean()),
        variance=float(gaps.var()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        loop=float(loops.mean()),
        loop_variance=float(loops.var()),
    )


def _apart(series: Seq[Seq[float]]) -> np.ndarray:
    """Milliseconds between neighbours within each series, over all series."""
    return 1000 * np.array([later - sooner for times in series for sooner, later in pairwise(times)])


Margin = Callable[[Seq[int], Seq[int]], float]
NEAR_TIE = 1e-4  # difference of two logits


@dataclass(frozen=True)
class Difference:
    """First difference between an output and plain decoding's.

    A token is None if that output has ended. ``margin`` is the difference of the two best logits there if
    decoding is greedy, otherwise None.
    """

    item: str
    turn: int
    index: int
    plain: int | None
    other: int | None
    margin: float | None


@dataclass(frozen=True)
class PerStep:
    """Mean milliseconds per step, without the first step; parts are None if unknown."""

    total: float
    draft: float | None
    verify: float | None
    rest: float | None

    @property
    def parts(self) -> list[float | None]:
        """The total and its parts, in the order of the tables."""
        return [self.total, self.draft, self.verify, self.rest]


@dataclass(frozen=True)
class Row:
    """Figures of one method on one suite. Counts are over all repeats; None if unknown.

    Attributes:
        drafter: the method's name.
        prompts: number of prompts, not turns; ``outputs`` counts answers.
        tau: tokens per step and sequence, including the target's own.
        acceptance_by_position: the share of steps that accepted a token at each depth.
        repeated_4grams: the mean share of 4-grams that occurred before in the same output.
        equal: all outputs equal plain decoding's; ``different`` counts those that do not.
        promised: equality is promised.
        adaptive: a governor decided how much was drafted.
        error: reason why the method failed; there are then no figures.
    """

    suite: str
    drafter: str
    batch: int
    peer: bool
    verifier: str
    promised: bool
    lossy: bool
    prompts: int
    outputs: int = 0
    tokens: int = 0
    speed: Speed | None = None
    samples: list[Sample] = field(default_factory=list)
    categories: dict[str, Speed] = field(default_factory=dict)
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    tau: float | None = None
    acceptance_rate: float | None = None
    acceptance_by_position: list[float] = field(default_factory=list)
    milliseconds_per_step: PerStep | None = None
    latency: Latency | None = None
    repeated_4grams: float = 0.0
    equal: bool = False
    different: int = 0
    differences: tuple[Difference, ...] = ()
    error: str | None = None
    adaptive: bool = False

    def breaks_promise(self, promise: Promise) -> bool:
        """True if an output differs from plain decoding's despite the promise.

        Args:
            promise: the target's; only "same tokens but for near-ties" excuses a near-tie.
        """
        if not self.promised or promise == "not exact":
            return False
        ties = promise == "same tokens but for near-ties"
        return any(not ties or one.margin is None or one.margin >= NEAR_TIE for one in self.differences)

    @property
    def label(self) -> str:
        """The method's name, with its verifier if that may change tokens."""
        return self.drafter if self.verifier in ("", "match") else f"{self.drafter}, {self.verifier}"


def rows_of(measured: Measured, margin: Margin) -> list[Row]:
    """Compute a row per method, plain decoding first.

    Args:
        margin: maps a prompt and the beginning of its output to the difference of the two best logits there.
    """
    return [_row(measured, trace, margin) for trace in measured.traces]


def _row(measured: Measured, trace: MethodRuns, margin: Margin) -> Row:
    groups = measured.groups[: len(trace.runs)] if trace.left else measured.groups
    method = trace.method
    head = Row(
        suite=measured.suite.name,
        drafter=trace.name,
        batch=measured.batch,
        peer=method.peer,
        verifier=method.verifier,
        promised=method.promised,
        lossy=method.lossy,
        prompts=sum(map(len, groups)),
        error=trace.error,
        adaptive=method.adaptive,
    )
    if trace.error is not None or not groups:
        return head
    runs = trace.all_runs
    outputs = [output for run in runs for output in run.outputs]
    steps = _total([run.steps for run in runs])
    drafted = _total([run.drafted for run in runs])
    accepted = _total([run.accepted for run in runs])
    differences = differences_of(measured, trace, margin)
    speed = speed_of(measured, trace, range(len(groups)))
    return Row(
        **{
            **vars(head),
            "outputs": len(outputs),
            "tokens": sum(map(len, outputs)),
            "speed": speed,
            "samples": samples_of(measured, trace),
            "categories": speed_of_categories(measured, trace),
            "steps": steps,
            "drafted": drafted,
            "accepted": accepted,
            "tau": speed.tau,
            "acceptance_rate": None if drafted is None or accepted is None else ratio(accepted, drafted),
            "acceptance_by_position": _by_position(runs, steps),
            "milliseconds_per_step": _per_step(runs),
            "latency": latency_of(runs),
            "repeated_4grams": statistics.fmean(map(repeated_4grams, outputs)),
            "equal": not differences,
            "different": len(differences),
            "differences": tuple(differences),
        }
    )


def _total(counts: Seq[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


# -- steps -----------------------------------------------------------------------------------------------


def _by_position(runs: Seq[MethodRun], steps: int | None) -> list[float]:
    depth = max((len(run.accepted_at) for run in runs), default=0)
    totals = [
        sum(run.accepted_at[place] for run in runs if place < len(run.accepted_at)) for place in range(depth)
    ]
    return [ratio(total, steps) for total in totals] if steps else []


def _per_step(runs: Seq[MethodRun]) -> PerStep | None:
    """Means over all steps but the first of each run."""
    if any(run.forwards is None for run in runs):
        return None
    steps = sum((run.forwards or 0) - 1 for run in runs)
    if steps < 1:
        return None
    total = 1000 * sum(run.seconds - run.first_seconds for run in runs) / steps
    draft = _milliseconds([run.draft_seconds for run in runs], steps)
    verify = _milliseconds([run.verify_seconds for run in runs], steps)
    rest = None if verify is None else max(0.0, total - verify - (draft or 0.0))
    return PerStep(total, draft, verify, rest)


def _milliseconds(seconds: Seq[float | None], steps: int) -> float | None:
    known = [one for one in seconds if one is not None]
    return 1000 * sum(known) / steps if len(known) == len(seconds) else None


# -- equality --------------------------------------------------------------------------------------------


def differences_of(measured: Measured, trace: MethodRuns, margin: Margin) -> list[Difference]:
    """List the outputs, over all repeats, that differ from plain decoding's of the first repeat."""
    found = []
    greedy = measured.settings.temperature == 0
    for place, repeats in enumerate(trace.runs):
        plain = measured.traces[0].runs[place][0]
        for turns in repeats:
            for turn, run in enumerate(turns):
                items = measured.taking_part(place, turn)
                for number, item in enumerate(items):
                    expected, output = plain[turn].outputs[number], run.outputs[number]
                    index = parting(expected, output)
                    if index is None:
                        continue
                    asked = measured.prompts[place][turn][number]
                    apart = margin(asked, expected[:index]) if greedy and index < len(expected) else None
                    found.append(
                        Difference(item.id, turn, index, _at(expected, index), _at(output, index), apart)
                    )
    return found


def _at(tokens: Seq[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def number(value: float | None, digits: int = 2) -> str:
    """Format a figure; "" if it is unknown."""
    return "" if value is None else f"{value:.{digits}f}"
