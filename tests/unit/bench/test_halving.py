"""Successive halving, by simulation: recorded tokens and seconds in place of a model and a clock."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from outpace.bench.halving import Halving
from outpace.core import OutpaceError

Table = Mapping[str, list[tuple[int, float]]]
RECORDED = Path(__file__).parent / "halving_costs.json"


def simulate(halving: Halving, table: Table) -> list[tuple[int, int, int]]:
    """Run all rounds; for each, how many candidates took part, and the groups of prompts from and to."""
    rounds = []
    while (todo := halving.next()) is not None:
        rounds.append((len(todo.names), todo.first, todo.stop))
        for group in range(todo.first, todo.stop):
            for name in todo.names:
                halving.learn(name, *table[name][group])
    return rounds


def made_up(speeds: Mapping[str, float], groups: int, noise: float = 0.0, seed: int = 0) -> Table:
    """A table of candidates of these tokens per second, 64 tokens to a group."""
    draws = random.Random(seed)
    return {
        name: [(64, 64 / speed * (1 + noise * draws.uniform(-1, 1))) for _ in range(groups)]
        for name, speed in speeds.items()
    }


def speed_of(table: Table, name: str, groups: range) -> float:
    return sum(table[name][group][0] for group in groups) / sum(table[name][group][1] for group in groups)


SIXTEEN = {f"c{number}": 10.0 + number for number in range(16)}


def test_the_better_half_stays_and_is_measured_on_twice_as_much() -> None:
    """With time for everything, all prompts go to the last two, half as many to four, and so on."""
    for budget in (1e9, math.inf):
        halving = Halving(list(SIXTEEN), 80, budget)
        rounds = simulate(halving, made_up(SIXTEEN, 80))
        assert rounds == [(16, 0, 1), (16, 1, 10), (8, 10, 20), (4, 20, 40), (2, 40, 80)]
    assert halving.best.name == "c15" and halving.best.measured == 80
    assert halving.best.speed == pytest.approx(25.0)
    assert halving.candidates["c0"].measured == 10


def test_rounds_take_equal_parts_of_the_time() -> None:
    """All equally fast: 64 groups take the budget, 16 each of 4 rounds."""
    same = dict.fromkeys(SIXTEEN, 64.0)
    table = made_up(same, 1000)
    halving = Halving(list(same), 1000, 64.0 * 4)
    # The first group, which tells what groups take, is part of the first round.
    assert simulate(halving, table) == [(16, 0, 1), (16, 1, 4), (8, 4, 12), (4, 12, 28), (2, 28, 60)]
    assert halving.spent == pytest.approx(256.0)


def test_other_work_is_part_of_the_budget() -> None:
    same = dict.fromkeys(SIXTEEN, 64.0)
    halving = Halving(list(same), 1000, 64.0 * 4)
    halving.spend(200.0)
    rounds = simulate(halving, made_up(same, 1000))
    assert sum(count * (stop - first) for count, first, stop in rounds) <= 64 + 16
    assert halving.spent >= 200.0


def test_no_time_is_left_for_a_second_round() -> None:
    halving = Halving(list(SIXTEEN), 100, 1.0)
    assert simulate(halving, made_up(SIXTEEN, 100)) == [(16, 0, 1)]
    assert halving.best.name == "c15"


def test_where_no_group_fits_more_leave() -> None:
    """After the first group there is time for 6 more, not for the 8 of the next round."""
    same = dict.fromkeys(SIXTEEN, 64.0)
    halving = Halving(list(same), 100, 22.0)
    assert simulate(halving, made_up(same, 100)) == [(16, 0, 1), (2, 1, 4)]
    assert halving.spent == pytest.approx(22.0)


def test_prompts_run_out() -> None:
    halving = Halving(list(SIXTEEN), 5, math.inf)
    assert simulate(halving, made_up(SIXTEEN, 5)) == [(16, 0, 1), (8, 1, 2), (4, 2, 3), (2, 3, 5)]
    assert halving.best.name == "c15"


def test_baselines_are_measured_to_the_end_and_may_win() -> None:
    speeds = {"none": 5.0, **SIXTEEN}
    halving = Halving(list(speeds), 100, math.inf, baselines=["none"])
    rounds = simulate(halving, made_up(speeds, 100))
    assert [count for count, _, _ in rounds] == [17, 17, 9, 5, 3]
    assert halving.best.name == "c15"
    assert halving.candidates["none"].measured == halving.best.measured == 100
    fast = {**speeds, "none": 50.0}
    halving = Halving(list(fast), 100, math.inf, baselines=["none"])
    simulate(halving, made_up(fast, 100))
    assert halving.best.name == "none"


def test_a_lucky_start_is_no_proof() -> None:
    """Who was measured least does not win, however fast that was."""
    halving = Halving(["steady", "lucky"], 100, 100.0)
    halving.next()
    halving.learn("steady", 64, 1.0)
    halving.learn("lucky", 64, 0.5)
    halving.next()
    halving.learn("steady", 64, 1.0)  # the time ran out before the other's turn
    assert halving.best.name == "steady"


def test_a_candidate_that_fails_is_out() -> None:
    halving = Halving(["a", "b", "c"], 100, math.inf)
    todo = halving.next()
    assert todo is not None
    halving.fail("a", "a: no room")
    halving.learn("b", 10, 1.0)
    halving.learn("c", 20, 1.0)
    simulate(halving, made_up({"b": 10, "c": 20}, 100))
    assert halving.best.name == "c" and halving.candidates["a"].failed == "a: no room"
    for name in ("b", "c"):
        halving.fail(name, "nor they")
    with pytest.raises(OutpaceError, match="no candidate could be measured: a: no room"):
        _ = halving.best


@pytest.mark.parametrize("seed", range(20))
def test_noise_costs_little(seed: int) -> None:
    """Seconds of a prompt are off by up to a half, and the choice is among the best three of 32."""
    speeds = {f"c{number}": 10.0 * 1.05**number for number in range(32)}
    table = made_up(speeds, 400, noise=0.5, seed=seed)
    halving = Halving(list(speeds), 400, 3000.0)
    simulate(halving, table)
    assert speeds[halving.best.name] >= 0.90 * max(speeds.values())
    assert halving.spent <= 3000.0 * 1.05


def recorded() -> Table:
    """Tokens and seconds of the embedded model on builtin's prompts, by candidates of ``outpace tune``."""
    found = json.loads(RECORDED.read_text())
    return {
        name: list(zip(one["tokens"], one["seconds"], strict=True))
        for name, one in found["candidates"].items()
    }


def test_recorded_costs_a_fifth_of_the_grid_and_within_5_percent_of_its_best() -> None:
    table = recorded()
    groups = len(table["none"])
    seen, unseen = range(0, groups, 2), range(1, groups, 2)
    tuned_on = {name: [rows[group] for group in seen] for name, rows in table.items()}
    grid = sum(seconds for rows in tuned_on.values() for _, seconds in rows)
    halving = Halving(list(table), len(seen), grid / 5, baselines=["none"])
    simulate(halving, tuned_on)
    assert halving.spent <= grid / 5
    best_of_grid = max(table, key=lambda name: speed_of(table, name, seen))
    chosen, best = (speed_of(table, name, unseen) for name in (halving.best.name, best_of_grid))
    assert chosen >= 0.95 * best


@pytest.mark.parametrize(
    ("names", "groups", "budget", "baselines", "share"),
    [
        ([], 1, 1.0, [], 2),
        (["a", "a"], 1, 1.0, [], 2),
        (["a"], 0, 1.0, [], 2),
        (["a"], 1, 0.0, [], 2),
        (["a"], 1, math.nan, [], 2),
        (["a"], 1, 1.0, ["b"], 2),
        (["a"], 1, 1.0, [], 1),
    ],
)
def test_mistakes(names: list[str], groups: int, budget: float, baselines: list[str], share: int) -> None:
    with pytest.raises(OutpaceError):
        Halving(names, groups, budget, baselines, share)


def test_no_time_at_all_is_no_measurement() -> None:
    with pytest.raises(OutpaceError, match="no measurement"):
        Halving(["a"], 1, 1.0).learn("a", 5, 0.0)
