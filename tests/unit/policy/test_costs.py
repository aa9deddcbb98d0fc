"""Measured costs: medians, smooth curves, forgetting, and the file."""

from __future__ import annotations

import json
import math

import pytest

from outpace.policy.costs import Costs, Curve, bucket


def curve(points: dict[int, float], times: int = 5) -> Curve:
    made = Curve()
    for _ in range(times):
        for rows, seconds in points.items():
            made.add(rows, seconds)
    return made


def test_a_width_answers_with_the_median_of_its_latest_measurements() -> None:
    made = curve({1: 1.0})
    for seconds in [9.0, 1.1, 1.2, 50.0, 1.0, 1.1, 1.2]:
        made.add(1, seconds)
    assert 1.0 <= made.seconds_at(1) <= 1.2
    for _ in range(36):
        made.add(1, 3.0)
    assert made.seconds_at(1) == 3.0


def test_the_slow_first_measurement_does_not_count_alone() -> None:
    made = Curve()
    made.add(1, 10.0)
    assert not made and math.isnan(made.seconds_at(1)) and made.age(1) == math.inf
    made.add(1, 1.0)
    assert made and made.seconds_at(1) == 1.0 and made.age(1) == 0


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_no_time_at_all_is_not_a_measurement(seconds: float) -> None:
    made = curve({1: 1.0})
    for _ in range(20):
        made.add(1, seconds)
    assert made.seconds_at(1) == 1.0


def test_an_unknown_curve_knows_nothing() -> None:
    assert not Curve()
    assert math.isnan(Curve().seconds_at(3))


def test_beyond_the_widest_known_width_rows_cost_what_prompts_told() -> None:
    costs = Costs()
    for _ in range(5):
        costs.add(8, 8, 1.0)
    before = costs.seconds(8, 800)
    costs.set_floor(0.05)
    costs.add(16, 16, 1.0)
    assert costs.seconds(8, 800) == pytest.approx(40.0) and before < 10
    assert costs.seconds(16, 800) == pytest.approx(40.0)  # a curve that came later too
    assert costs.seconds(8, 8) == 1.0
    for _ in range(5):
        costs.add(8, 800, 20.0)
    assert costs.seconds(8, 800) == 20.0 and costs.seconds(8, 1600) == pytest.approx(80.0)
    costs.set_floor(0.055)  # a small change is not worth computing all again
    assert costs.seconds(8, 1600) == pytest.approx(80.0)


def test_between_widths_a_line_and_beyond_them_half_the_mean_slope() -> None:
    made = curve({1: 1.0, 9: 3.0, 17: 4.0})
    assert made.seconds_at(9) == 3.0
    # What was never tried gets half of the line's rise off.
    assert made.seconds_at(33) == pytest.approx(4.0 + 0.5 * 16 * 3 / 16)
    assert made.seconds_at(5) == pytest.approx(1.0 + 0.5 * 1.0)
    assert curve({1: 1.0, 5: 2.0, 9: 3.0}).seconds_at(5) == 2.0


def test_short_of_the_narrowest_width_the_slope_goes_on() -> None:
    made = curve({16: 10.0, 32: 14.0})
    assert made.seconds_at(8) == pytest.approx(10.0 - 8 * 4 / 16)
    assert curve({16: 10.0, 32: 30.0}).seconds_at(1) == 5.0  # no more than half is taken off


def test_widths_alike_say_nothing_of_the_slope() -> None:
    made = curve({14: 1.0, 15: 1.0, 16: 1.0})
    assert made.seconds_at(140) == pytest.approx(1.0 + 0.5 * made.slope * (140 - 16) / 14)


def test_rows_beyond_those_that_kernels_tile_cost_the_measured_slope() -> None:
    made = curve({8: 1.0, 40: 2.0})
    slope = 1 / 32
    assert made.seconds_at(56) == pytest.approx(2.0 + 0.5 * slope * 16)
    assert made.seconds_at(64 + 100) == pytest.approx(2.0 + 0.5 * slope * 24 + slope * 100)


def test_wider_never_counts_as_cheaper() -> None:
    made = curve({1: 1.0, 2: 1.4, 3: 1.2, 5: 2.0})
    seconds = [made.seconds_at(rows) for rows in range(1, 9)]
    assert seconds == sorted(seconds)
    assert made.seconds_at(2) == made.seconds_at(3) == pytest.approx(1.3)


def test_one_outlier_does_not_make_a_width_look_dear() -> None:
    made = curve({1: 1.0, 2: 1.1, 4: 1.2})
    made.add(8, 40.0)
    assert made.seconds_at(8) < 2.5
    for _ in range(6, 16):
        made.add(8, 40.0)
    assert made.seconds_at(8) == 40.0


def test_a_width_not_measured_any_more_is_forgotten() -> None:
    made = curve({1: 1.0, 4: 2.0})
    made.take_over([(16, 5.0)])
    for _ in range(400):
        made.add(1, 1.0)
    assert [rows for rows, _ in made.points()] == [1, 4, 16]
    for _ in range(200):
        made.add(1, 1.0)
    assert [rows for rows, _ in made.points()] == [1, 16]  # what came from elsewhere stays


def test_buckets_are_an_eighth_of_an_octave_at_most() -> None:
    assert [bucket(n) for n in range(1, 16)] == list(range(1, 16))
    assert all(bucket(n) <= n < bucket(n) * 1.125 for n in range(1, 3000))
    assert len({bucket(n) for n in range(1, 1025)}) < 80


def test_a_new_batch_borrows_from_the_nearest_and_is_then_itself() -> None:
    costs = Costs()
    for _ in range(3):
        costs.add(4, 4, 1.0)
        costs.add(4, 8, 2.0)
        costs.add(64, 64, 9.0)
    assert costs.seconds(5, 8) == 2.0
    assert costs.curve(5).age(8) == math.inf
    costs.add(5, 8, 3.0)
    costs.add(5, 8, 3.0)
    assert costs.seconds(5, 8) == 3.0
    assert costs.seconds(5, 4) == 1.5  # scaled as the width that was measured
    assert costs.seconds(4, 8) == 2.0
    assert math.isnan(Costs().seconds(1, 1))


def test_curves_survive_a_file() -> None:
    costs = Costs()
    for _ in range(4):
        for rows, seconds in ((1, 1.0), (2, 1.5), (40, 9.0)):
            costs.curve(1).add(rows, seconds)
    again = Costs()
    again.fill(json.loads(json.dumps(costs.dump())))
    assert again.dump() == costs.dump() == {"1": [[1, 1.0], [2, 1.5], [40, 9.0]]}


@pytest.mark.parametrize(
    "table",
    [{"0": [[1, 1.0]]}, {"x": []}, {"1": [[1, -1.0]]}, {"1": [[-1, 1.0]]}, {"1": [[1, "a"]]}, {"1": 3}],
)
def test_a_table_of_nonsense_is_an_error(table: dict[str, list[tuple[float, float]]]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Costs().fill(table)
