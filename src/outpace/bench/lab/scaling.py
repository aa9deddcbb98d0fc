"""The scaling law of lookahead decoding, put to the test: steps over (W, N, G), against FLOPs per step.

Fu et al. 2024 (arXiv 2402.02057), section 4, take a step of lookahead decoding for a check of b independent
guesses of length g, each token of which is accepted with probability a. The expected number of tokens of such
a step, the target's own included, is

    E = (g + 1) - sum over i = 1..g of (1 - a^i)^b,

with b = W = G and g = N - 1. Good guesses are not always there: one step in f has them, and the other f - 1
give one token each, so that tokens per step, the compression, are S = (f - 1 + E) / f. Here a and f are
fitted to measured steps, one pair for all settings of a suite. The claim under test is that, with a large
enough N, steps fall linearly in the logarithm of the FLOPs of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outpace.bench.items import Suite
from outpace.bench.lab.roof import Work
from outpace.bench.ours import Ours
from outpace.bench.rows import rows_of
from outpace.bench.run import Measured, Settings, measure
from outpace.bench.runs import BASELINE
from outpace.bench.statistics import ratio
from outpace.core import OutpaceError
from outpace.loading import Loaded

LEAST_POINTS = 3  # of one N, for a line to mean anything


class Setting(NamedTuple):
    """Options of lookahead decoding, with as many guesses as columns."""

    window: int
    ngram: int

    @property
    def depth(self) -> int:
        """Tokens that its draft may look ahead."""
        return self.window + self.ngram

    def spec(self, from_text: bool) -> str:
        """The drafter's. Without n-grams ``from_text``, prompt and output, all come from the window."""
        pools = f"pool_from_prompt={from_text},pool_from_output={from_text}"
        return f"lookahead:window={self.window},ngram={self.ngram},guesses={self.window},{pools}"


@dataclass(frozen=True)
class Point:
    """Result of one setting on a suite.

    Attributes:
        rows: of a mean step, for one sequence.
        flops: operations of a mean step, for one sequence.
        steps: of all answers.
        tau: tokens per step, the compression S.
    """

    setting: Setting
    rows: float
    flops: float
    steps: int
    tau: float
    equal: bool


@dataclass(frozen=True)
class Fit:
    """a and f, and the root of the mean squared relative error of the S they predict."""

    acceptance: float
    every: float
    error: float

    def predict(self, setting: Setting) -> float:
        """S of a setting."""
        return compression(self.acceptance, self.every, setting.window, setting.ngram - 1)


@dataclass(frozen=True)
class Line:
    """Steps of one N over the logarithm of the FLOPs, by least squares.

    Attributes:
        slope: what doubling the FLOPs of a step changes, as a share of plain decoding's steps.
        r2: the share of the steps' variance that the line explains.
        first_half, second_half: slopes of the cheaper and the dearer half of the points: on a line the same.
    """

    ngram: int
    slope: float
    r2: float
    first_half: float
    second_half: float


@dataclass(frozen=True)
class Scaling:
    """The whole result: plain decoding's steps and FLOPs per step, the points, the fit, and a line per N."""

    suite: str
    prompts: int
    plain_steps: int
    plain_flops: float
    points: list[Point]
    fit: Fit
    lines: list[Line]
    whole: bool


def expected_tokens(acceptance: float, guesses: int, length: int) -> float:
    """E: tokens of a step that checks independent guesses of ``length`` tokens each."""
    missed = sum((1 - acceptance**place) ** guesses for place in range(1, length + 1))
    return length + 1 - missed


def compression(acceptance: float, every: float, guesses: int, length: int) -> float:
    """S: tokens per step where one step in ``every`` has good guesses."""
    return (every - 1 + expected_tokens(acceptance, guesses, length)) / every


def fit(points: Seq[tuple[Setting, float]]) -> Fit:
    """Find the a and f that predict measured S with the least squared relative error.

    f enters linearly, by 1 / f, the share of good steps. So for each a the best share has a closed form,
    and a alone is searched, on finer and finer grids.

    Raises:
        OutpaceError: fewer than two points.
    """
    if len(points) < 2:
        raise OutpaceError("two numbers need two settings at least; give more --windows or --ngrams")
    measured = np.array([tau for _, tau in points])

    def best_share(acceptance: float) -> tuple[float, float]:
        gains = np.array([expected_tokens(acceptance, s.window, s.ngram - 1) - 1 for s, _ in points])
        # Minimise the sum of ((1 + share * gain) / S - 1)^2.
        weights = gains / measured
        share = float(weights @ (1 - 1 / measured) / (weights @ weights)) if weights @ weights else 0.0
        share = min(1.0, max(share, 1e-6))
        errors = (1 + share * gains) / measured - 1
        return float(np.sqrt(np.mean(errors**2))), share

    low, high = 1e-4, 1 - 1e-4
    for _ in range(6):
        grid = np.linspace(low, high, 41)
        place = int(np.argmin([best_share(float(a))[0] for a in grid]))
        low, high = float(grid[max(place - 1, 0)]), float(grid[min(place + 1, 40)])
    error, share = best_share(float(grid[place]))
    return Fit(float(grid[place]), 1 / share, error)


def line(ngram: int, points: Seq[Point], plain_steps: int) -> Line:
    """Fit steps over log2 of the FLOPs, as a share of plain decoding's, for the points of one N.

    Raises:
        OutpaceError: too few points.
    """
    if len(points) < LEAST_POINTS:
        raise OutpaceError(f"a line needs {LEAST_POINTS} windows at least; give more --windows")
    ordered = sorted(points, key=lambda point: point.flops)
    x = np.array([math.log2(point.flops) for point in ordered])
    y = np.array([point.steps / plain_steps for point in ordered])
    slope, r2 = _straight(x, y)
    half = (len(x) + 1) // 2  # the middle point belongs to both
    first, _ = _straight(x[:half], y[:half])
    second, _ = _straight(x[-half:], y[-half:])
    return Line(ngram, slope, r2, first, second)


def _straight(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and R squared of a line by least squares; a line through equal values explains all."""
    slope, offset = np.polyfit(x, y, 1)
    spread = float(np.sum((y - y.mean()) ** 2))
    left = float(np.sum((y - slope * x - offset) ** 2))
    return float(slope), 1 - ratio(left, spread)


def measure_scaling(
    subject: Loaded,
    work: Work,
    suite: Suite,
    settings: Settings,
    grid: Seq[Setting],
    from_text: bool = False,
    batch: int = 1,
    advanced: Callable[[Measured], None] = lambda measured: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Scaling:
    """Count the steps of every setting on a suite; seconds do not matter, so prompts may be decoded together.

    Args:
        work: of a step of the model.
        from_text: n-grams of prompt and output go into the pool too. The law is about the window's own.
        batch: prompts decoded at once.

    Raises:
        OutpaceError: too few settings for a fit, or plain decoding failed.
    """
    specs = [setting.spec(from_text) for setting in grid]
    # A window is as deep as it is wide: near the end of an answer it would be cut to what is left of it.
    methods = [Ours(subject.target, BASELINE)] + [
        Ours(subject.target, spec, adaptive=False, beyond=setting.depth)
        for setting, spec in zip(grid, specs, strict=True)
    ]
    found = measure(subject, methods, suite, batch, settings, advanced, stopped)
    if not found.groups:
        raise OutpaceError("interrupted before any prompt was decoded by every setting")
    plain, *rows = rows_of(found, lambda text: math.nan, None)
    asked = [len(prompt) for group in found.prompts for turn in group for prompt in turn]
    context = sum(asked) / len(asked) + settings.max_new_tokens / 2
    points = []
    for setting, spec, row in zip(grid, specs, rows, strict=True):
        if row.error is not None or row.steps is None or row.drafted is None or row.tau is None:
            raise OutpaceError(f"{spec} failed: {row.error}")
        width = 1 + row.drafted / row.steps
        points.append(Point(setting, width, work.operations(width, context), row.steps, row.tau, row.equal))
    plain_steps = plain.steps or 0
    return Scaling(
        suite=suite.name,
        prompts=plain.prompts,
        plain_steps=plain_steps,
        plain_flops=work.operations(1, context),
        points=points,
        fit=fit([(point.setting, point.tau) for point in points]),
        lines=[
            line(ngram, same, plain_steps)
            for ngram in sorted({setting.ngram for setting in grid})
            if len(same := [point for point in points if point.setting.ngram == ngram]) >= LEAST_POINTS
        ],
        whole=len(found.groups) == -(-len(suite.items) // batch),
    )
