"""Medians, their spread, and confidence intervals, as pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

RESAMPLES = 4000
CONFIDENCE = 0.95


def quartiles(values: Seq[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def interval(ratios: Seq[float]) -> tuple[float, float] | None:
    """The 95% interval of the median of paired ratios, by a bootstrap over the pairs; None for one pair.

    The percentile bootstrap of Efron and Tibshirani 1993: prompts are resampled with replacement, each with
    both of its measurements, and the interval is the middle 95% of the medians. It covers the choice of
    prompts and the noise between prompts, not a machine that was slow throughout.
    """
    values = np.asarray(ratios, dtype=float)
    return None if len(values) < 2 else _middle(np.median(values[_resampled(len(values))], axis=1))


def interval_of_rates(
    mine: Seq[tuple[float, float]], theirs: Seq[tuple[float, float]]
) -> tuple[float, float] | None:
    """The 95% interval of the quotient of two rates over all prompts, by the same bootstrap; None for one.

    Args:
        mine, theirs: tokens and seconds of each prompt; a rate is all tokens over all seconds.
    """
    if len(mine) < 2:
        return None
    places = _resampled(len(mine))
    first, second = (np.asarray(each, dtype=float)[places].sum(axis=1) for each in (mine, theirs))
    return _middle(first[:, 0] / first[:, 1] / (second[:, 0] / second[:, 1]))


def _resampled(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def _middle(values: np.ndarray) -> tuple[float, float]:
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, (outside, 1 - outside))
    return float(low), float(high)


def overlap(first: Seq[float] | None, second: Seq[float] | None) -> bool | None:
    """True if two intervals have a point in common; None if one of them is None."""
    if first is None or second is None:
        return None
    return first[0] <= second[1] and second[0] <= first[1]


def repeated_4grams(tokens: Seq[int]) -> float:
    """The share of an output's 4-grams that occurred in it before; repetition favours n-gram methods."""
    grams = [tuple(tokens[place : place + 4]) for place in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def ratio(above: float, below: float) -> float:
    """The quotient of two numbers; 0 if the divisor is 0."""
    return above / below if below else 0.0
