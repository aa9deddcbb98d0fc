"""Test of the scaling law of lookahead decoding: steps over (W, N, G), against FLOPs per step.

Fu et al. 2024 (arXiv 2402.02057), section 4, model a step of lookahead decoding as the verification of b
independent guesses of length g, each token of which is accepted with probability a. The expected number of
tokens of such a step, including the target's own, is

    E = (g + 1) - sum over i = 1..g of (1 - a^i)^b,

with b = W = G and g = N - 1. Good guesses are not always available: one step in f has them, and the other
f - 1 emit one token each, so that the compression, the tokens per step, is S = (f - 1 + E) / f. Here a and f
are fitted to measured steps, one pair for all settings of a suite. The claim under test is that, with a large
enough N, the number of steps falls linearly in the logarithm of the FLOPs of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outpace.bench.items import Suite
from outpace.bench.ours import Ours
from outpace.bench.rows import rows_of
from outpace.bench.run import Measured, Settings, measure
from outpace.bench.runs import BASELINE
from outpace.bench.statistics import ratio
from outpace.core import OutpaceError
from outpace.loading import Loaded
from outpace_lab.bench.roof import Work

LEAST_POINTS = 3  # per N, for a line to be meaningful


class Setting(NamedTuple):
    """Options of lookahead decoding, with as many guesses as columns."""

    window: int
    ngram: int

    @property
    def depth(self) -> int:
        """Maximum depth of its drafts."""
        return self.window + self.ngram

    def spec(self, from_text: bool) -> str:
        """The drafter's spec; without ``from_text``, n-grams come only from the window."""
        pools = f"pool_from_prompt={from_text},pool_from_output={from_text}"
        return f"lookahead:window={self.window},ngram={self.ngram},guesses={self.window},{pools}"


@dataclass(frozen=True)
class Point:
    """Result of one setting on a suite.

    Attributes:
        rows: rows of a mean step, for one sequence.
        flops: operations of a mean step, for one sequence.
        steps: number of steps of all answers.
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
    """Fitted a and f, and the root mean squared relative error of the predicted S."""

    acceptance: float
    every: float
    error: float

    def predict(self, setting: Setting) -> float:
        """S of a setting."""
        return compression(self.acceptance, self.every, setting.window, setting.ngram - 1)


@dataclass(frozen=True)
class Line:
    """Least-squares line of the steps of one N over the logarithm of the FLOPs.

    Attributes:
        slope: change of the steps per doubling of the FLOPs, as a share of plain decoding's steps.
        r2: the share of the steps' variance that the line explains.
        first_half, second_half: slopes of the cheaper and the more expensive half of the points; equal if the
            points are on a line.
    """

    ngram: int
    slope: float
    r2: float
    first_half: float
    second_half: float


@dataclass(frozen=True)
class Scaling:
    """The result: plain decoding's steps and FLOPs per step, the points, the fit, and a line per N."""

    suite: str
    prompts: int
    plain_steps: int
    plain_flops: float
    points: list[Point]
    fit: Fit
    lines: list[Line]
    whole: bool


def expected_tokens(acceptance: float, guesses: int, length: int) -> float:
    """E: expected tokens of a step that verifies independent guesses of ``length`` tokens each."""
    missed = sum((1 - acceptance**place) ** guesses for place in range(1, length + 1))
    return length + 1 - missed


def compression(acceptance: float, every: float, guesses: int, length: int) -> float:
    """S: tokens per step if one step in ``every`` has good guesses."""
    return (every - 1 + expected_tokens(acceptance, guesses, length)) / every


def fit(points: Seq[tuple[Setting, float]]) -> Fit:
    """Fit a and f to measured S by least squares of the relative error.

    S is linear in 1 / f, the share of good steps. So for each a the best share has a closed form, and only a
    is searched, on successively finer grids.

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
    """Slope and R squared of a least-squares line; R squared is 1 for equal values."""
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
        work: work of a step of the model.
        from_text: n-grams of prompt and output go into the pool too. The law covers only the window's.
        batch: number of prompts decoded together.

    Raises:
        OutpaceError: too few settings for a fit, or plain decoding failed.
    """
    specs = [setting.spec(from_text) for setting in grid]
    # A window is as deep as it is wide: near the end of an answer it would be cut to the remaining tokens.
    methods = [Ours(subject.target, BASELINE)] + [
        Ours(subject.target, spec, adaptive=False, beyond=setting.depth)
        for setting, spec in zip(grid, specs, strict=True)
    ]
    found = measure(subject, methods, suite, batch, settings, advanced, stopped, warm_up=False)
    if not found.groups:
        raise OutpaceError("interrupted before any prompt was decoded by every setting")
    plain, *rows = rows_of(found, lambda asked, output: math.nan)
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
