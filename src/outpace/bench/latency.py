"""Time between tokens as a client sees it, and the time per loop iteration, as pure functions of runs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from outpace.bench.runs import MethodRun


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
