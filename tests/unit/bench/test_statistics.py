"""Quartiles, intervals and shares, by hand and beside scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap

from outpace.bench.statistics import interval, interval_of_rates, overlap, quartiles, ratio, repeated_4grams


def test_quartiles() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("count", [8, 25, 60])
def test_the_interval_is_the_percentile_bootstraps(count: int) -> None:
    values = np.random.default_rng(1).lognormal(0.3, 0.4, size=count)
    found = interval(list(values))
    assert found is not None
    expected = bootstrap(
        (values,), np.median, method="percentile", n_resamples=20_000, random_state=2
    ).confidence_interval
    spread = expected.high - expected.low
    assert found[0] == pytest.approx(expected.low, abs=0.1 * spread)
    assert found[1] == pytest.approx(expected.high, abs=0.1 * spread)
    assert found[0] <= np.median(values) <= found[1]


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    draws = [interval(list(random.lognormal(0.5, 0.5, size=31))) for _ in range(120)]
    covered = sum(low <= np.exp(0.5) <= high for low, high in filter(None, draws))
    assert 105 <= covered <= 120  # 95% of 120 is 114


def test_one_pair_has_no_interval() -> None:
    assert interval([1.5]) is None
    assert interval([1.5, 1.5]) == (1.5, 1.5)


def test_repeated_4grams() -> None:
    assert repeated_4grams([1, 2, 3, 4, 5, 6]) == 0
    assert repeated_4grams([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert repeated_4grams([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_4grams([1, 2]) == 0


def test_a_ratio_to_nothing_is_nothing() -> None:
    assert ratio(3, 2) == 1.5 and ratio(3, 0) == 0


def test_the_interval_of_rates_is_the_percentile_bootstraps() -> None:
    random = np.random.default_rng(5)
    mine, theirs = random.uniform(1, 2, size=(2, 40, 2))

    def quotient(*columns: np.ndarray) -> np.ndarray:
        tokens, seconds, its_tokens, its_seconds = (column.sum(axis=-1) for column in columns)
        return tokens / seconds / (its_tokens / its_seconds)

    expected = bootstrap(
        (*mine.T, *theirs.T), quotient, paired=True, n_resamples=20_000, method="percentile", random_state=2
    ).confidence_interval
    found = interval_of_rates(mine.tolist(), theirs.tolist())
    spread = expected.high - expected.low
    assert found == pytest.approx((expected.low, expected.high), abs=0.1 * spread)
    assert interval_of_rates([(1, 2)], [(2, 1)]) is None


def test_intervals_that_meet_overlap() -> None:
    assert overlap((1.4, 1.6), (1.6, 1.8)) is overlap((1.6, 1.8), (1.4, 1.6)) is True
    assert overlap((1.4, 1.6), (1.7, 1.9)) is overlap((1.7, 1.9), (1.4, 1.6)) is False
    assert overlap((1.4, 1.6), None) is overlap(None, (1.4, 1.6)) is None
