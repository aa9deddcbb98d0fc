"""The governor by simulation: recorded step costs, acceptance processes, seeded noise, and no clock."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from outpace.core import Draft, OutpaceError
from outpace.policy.acceptance import Acceptance
from outpace.policy.costs import Costs, Curve
from outpace.policy.governor import WIDTHS, FullOrNarrow, Governor, Pinned
from outpace.policy.plan import DraftPlan, Outcome, Policy
from parts import in_turn
from unit.policy.simulation import (
    CURVES,
    Machine,
    Seconds,
    Text,
    constant,
    flat,
    jump,
    linear,
    recorded,
    simulate,
    steep,
)

NOISY = {"jitter": 0.1, "outliers": 0.01, "warm_up": 3.0}
CANDIDATES = (0, 1, 2, 4, 6, 8, 16, 64)


def seconds(
    make: type[Governor] | int, cost: str, text: Text, tokens: int, batch: int = 1, **noise: float
) -> float:
    """Mean simulated seconds over two seeds."""
    return statistics.mean(
        simulate(
            Pinned(make) if isinstance(make, int) else make(),
            Machine(CURVES[cost], seed=seed, **noise),  # type: ignore[arg-type]
            text,
            tokens,
            batch,
            seed=seed,
        )
        for seed in range(2)
    )


def best_fixed(cost: str, text: Text, tokens: int, batch: int = 1, **noise: float) -> float:
    return min(seconds(nodes, cost, text, tokens, batch, **noise) for nodes in CANDIDATES)


@pytest.mark.parametrize(("cost", "chance"), in_turn(CURVES, [0.0, 0.6, 0.9]))
def test_close_to_the_best_fixed_width(cost: str, chance: float) -> None:
    text = Text(constant(chance))
    assert seconds(Governor, cost, text, 2000) < 1.08 * best_fixed(cost, text, 2000)


@pytest.mark.parametrize(
    ("chance", "bound", "cost"),
    in_turn([(0.0, 1.05), (0.6, 1.15), (0.9, 1.3)], ["flat", "stepped", "recorded"]),
)
def test_close_to_it_under_noise(cost: str, chance: float, bound: float) -> None:
    text = Text(constant(chance))
    assert seconds(Governor, cost, text, 3000, **NOISY) < bound * best_fixed(cost, text, 3000, **NOISY)


@pytest.mark.parametrize("noise", [{}, NOISY])
@pytest.mark.parametrize("cost", CURVES)
def test_drafts_that_never_stand_cost_next_to_nothing(cost: str, noise: dict[str, float]) -> None:
    for text in (Text(constant(0.0)), Text(constant(0.0), found=0.2)):
        plain = seconds(0, cost, text, 2000, **noise)
        assert seconds(Governor, cost, text, 2000, **noise) < 1.03 * plain


@pytest.mark.parametrize("cost", CURVES)
def test_a_batch_of_sixteen_is_never_much_slower_than_plain(cost: str) -> None:
    for chance in (0.0, 0.3, 0.8):
        text = Text(constant(chance))
        plain = seconds(0, cost, text, 1000, batch=16)
        assert seconds(Governor, cost, text, 1000, batch=16) < 1.04 * plain


@pytest.mark.parametrize("cost", ["recorded", "linear", "flat"])
def test_a_text_that_changes(cost: str) -> None:
    """A quarter that is easily guessed, half that is not, a quarter that is: as good as the best of each."""
    tokens, easy = 3200, 0.85

    def chance(token: int) -> float:
        return 0.0 if tokens // 4 <= token < 3 * tokens // 4 else easy

    found = seconds(Governor, cost, Text(chance), tokens)
    best = 2 * best_fixed(cost, Text(constant(easy)), tokens // 4) + seconds(
        0, cost, Text(constant(0)), tokens // 2
    )
    assert found < 1.09 * best


def test_a_drafter_that_must_warm_up_is_given_the_time() -> None:
    text = Text(constant(0.8), cold=8)

    def made() -> Governor:
        return Governor(widths=(24, 28, 32), ramp=16)

    found = simulate(made(), Machine(flat), text, 2000)
    assert found < 1.05 * simulate(Pinned(32), Machine(flat), text, 2000)
    useless = Text(constant(0.0), cold=8)
    plain = simulate(Pinned(0), Machine(linear), useless, 2000)
    assert simulate(made(), Machine(linear), useless, 2000) < 1.03 * plain


@pytest.mark.parametrize(
    ("cost", "full", "narrow"),
    in_turn(
        sorted({*CURVES} - {"jump"}),  # there a trial costs more than the account
        [(0.7, 0.3), (0.7, 0.6), (0.6, 0.6), (0.5, 0.0), (0.0, 0.0)],
    ),
)
def test_full_or_narrow_drafts_whichever_is_faster(cost: str, full: float, narrow: float) -> None:
    only = Text(constant(narrow))
    text = Text(constant(full), cold=4, narrow=only)

    def pinned(width: int, text: Text) -> float:
        return simulate(Pinned(width), Machine(CURVES[cost]), text, 3000)

    best = min(*(pinned(width, text) for width in (0, 30, 35)), *(pinned(width, only) for width in (4, 8)))
    policy = FullOrNarrow((4, 8), (30, 35), ramp=8)
    assert simulate(policy, Machine(CURVES[cost]), text, 3000) < 1.08 * best


def plans(policy: Policy, machine: Machine, text: Text, tokens: int, batch: int = 1) -> list[int]:
    """Nodes planned for each step of a simulation."""
    noted: list[int] = []

    class Noting:
        timed = policy.timed

        def plan(self, batch: int) -> DraftPlan:
            plan = policy.plan(batch)
            noted.append(plan.nodes)
            return plan

        def learn(self, outcome: Outcome) -> None:
            policy.learn(outcome)

    simulate(Noting(), machine, text, tokens, batch)
    return noted


def test_nothing_is_drafted_before_a_plain_step_was_measured() -> None:
    governor = Governor()
    assert governor.plan(1) == DraftPlan(0)
    governor.learn(Outcome(DraftPlan(0), [0], [[]], 0.0, None))
    assert governor.plan(1) == DraftPlan(0)
    governor.learn(Outcome(DraftPlan(0), [0], [[]], 0.0, 0.5))
    assert governor.plan(1) == DraftPlan(0)  # it may have been slow, as the first
    governor.learn(Outcome(DraftPlan(0), [0], [[]], 0.0, 0.1))
    assert governor.plan(1).nodes > 0


def test_plain_steps_between_trials_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to follow a machine that becomes slower."""
    measured: list[int] = []
    add = Curve.add
    monkeypatch.setattr(Curve, "add", lambda *args, **named: (measured.append(1), add(*args, **named)))
    governor = Governor()
    costs = []
    for seconds, steps in ((0.1, 300), (0.2, 40)):
        for _ in range(steps):
            plan = governor.plan(1)
            drafting = seconds if plan.nodes else 1e-6
            governor.learn(Outcome(plan, [plan.nodes], [[]], drafting, seconds * (1 + plan.nodes)))
        costs.append(governor.costs()["verify"]["1"][0])
        measured, last = [], measured
    assert costs == [[1.0, 0.1], [1.0, 0.2]]
    assert len(last) < 2 * 40 / 3  # the forward's curve and the drafter's, of one step in four


def counted(governor: Governor) -> list[int]:
    """The batches that the governor works out the best width for, as it does."""
    batches: list[int] = []
    view = governor.view

    def counting(batch: int) -> Any:
        batches.append(batch)
        return view(batch)

    governor.view = counting  # type: ignore[method-assign]
    return batches


def test_the_best_width_is_worked_out_again_where_a_draft_has_told_something() -> None:
    governor = Governor()
    batches = counted(governor)
    simulate(governor, Machine(flat), Text(constant(0.9)), 400)
    assert len(batches) > 400 / 10  # nearly each step: one has ten tokens or so
    batches.clear()
    simulate(governor, Machine(flat), Text(constant(0.9), found=0.0), 400)
    assert 400 / 16 - 1 <= len(batches) < 400 / 4


def test_and_for_another_batch() -> None:
    governor = Governor()
    simulate(governor, Machine(flat), Text(constant(0.9)), 100)
    plan = governor.plan(1)
    governor.learn(Outcome(plan, [0], [[]], 0.0, flat(1)))
    batches = counted(governor)
    governor.plan(1)
    assert not batches
    governor.plan(8)
    assert batches == [8]


def test_a_trial_that_finds_nothing_to_draft_turns_nothing_on() -> None:
    """An expensive drafter, when nothing is known but the initial estimate of how many nodes exist."""
    noted = plans(Governor(), Machine(flat, draft=(0.3 * 20e-3, 0.0)), Text(constant(0.9), found=0.0), 400)
    assert sum(map(bool, noted[:100])) <= 5 / 0.3 + 4  # what the account holds at first
    assert sum(map(bool, noted[100:])) < 0.05 * 300


def test_plain_decoding_that_becomes_dear_is_noticed_while_drafts_pay() -> None:
    """From then on a plain step takes as long as a wide one, and wide drafts pay."""
    slow, text = False, Text(constant(0.5))

    def cost(rows: int) -> float:
        return max(8e-3 if slow else 0.0, 4e-3 + 0.4e-3 * (rows - 1))

    governor = Governor()
    before = plans(governor, Machine(cost), text, 2000)
    slow = True
    after = plans(governor, Machine(cost), text, 4000)
    assert statistics.mean(after[-400:]) > 1.5 * statistics.mean(before[-400:])


def test_trials_in_vain_become_rare_but_do_not_end() -> None:
    noted = plans(Governor(), Machine(recorded), Text(constant(0.0)), 3000)
    trials = [step for step, nodes in enumerate(noted) if nodes and not noted[step - 1]]
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert len(gaps) > 5
    assert gaps[-1] >= max(gaps[:3]) / 2
    assert 20 <= statistics.median(gaps) < 300


def test_guesses_that_begin_to_be_right_are_noticed() -> None:
    text = Text(lambda token: 0.9 if token > 300 else 0.0)
    for cost, late in ((flat, 16), (recorded, 60)):
        noted = plans(Governor(), Machine(cost, draft=(20e-6, 0.0)), text, 700)
        drafted = (step for step, nodes in enumerate(noted) if nodes > 1 and step > 300)
        assert next(drafted, len(noted)) - 300 < late
        assert statistics.mean(map(bool, noted[-20:])) > 0.9


@pytest.mark.parametrize("cost", [flat, lambda rows: 20e-3 + 0.1e-3 * rows])
def test_what_pays_is_found_within_64_tokens(cost: Seconds) -> None:
    """Rows nearly free, and a drafter with few right guesses: 1.2 tokens per step."""
    for seed in range(5):
        text = Text(constant(0.4), found=0.35)
        whole = simulate(Governor(), Machine(cost, draft=(100e-6, 0.0)), text, 64, seed=seed)
        fixed = simulate(Pinned(8), Machine(cost, draft=(100e-6, 0.0)), text, 64, seed=seed)
        assert whole < 1.1 * fixed
        noted = plans(Governor(), Machine(cost, draft=(100e-6, 0.0)), text, 200)
        assert statistics.mean(map(bool, noted[5:])) > 0.9


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 0.0, 1e9])
def test_a_clock_that_jumps_or_stops_changes_nothing(wrong: float) -> None:
    """One measurement in ten is wrong; with a clock that is always wrong it decodes plainly."""

    class Erratic(Machine):
        def forward(self, rows: int) -> float:
            return wrong if self._random.random() < 0.1 else super().forward(rows)

    governor = Governor()
    plans(governor, Erratic(recorded), Text(constant(0.9)), 600)
    noted = plans(governor, Erratic(recorded), Text(constant(0.9)), 200)
    assert statistics.mean(map(bool, noted)) > 0.9
    if not 0 < wrong < math.inf:
        broken = Governor()
        for _ in range(50):
            assert broken.plan(1) == DraftPlan(0)
            broken.learn(Outcome(DraftPlan(0), [0], [[]], wrong, wrong))


def test_governors_share_what_forwards_cost_and_not_what_is_accepted() -> None:
    costs = Costs()
    one, other = (Governor(drafter=name, costs=costs) for name in ("one", "other"))
    simulate(one, Machine(recorded), Text(constant(0.9)), 300)
    assert costs.seconds(1, 5) == pytest.approx(recorded(5), rel=0.1)
    assert other.plan(1).nodes > 0  # plain steps are known
    assert other.acceptance.expected() == Governor().acceptance.expected()
    assert one.costs()["verify"] == other.costs()["verify"]


def test_a_plan_takes_the_nodes_that_pay() -> None:
    draft = Draft([1, 2, 3], [-1, 0, 1], chances=[0.5, 0.2, 0.05])
    assert DraftPlan(2).take(draft) == 2
    assert [DraftPlan(64, cost).take(draft) for cost in (0.0, 0.1, 0.3, 0.6)] == [3, 2, 1, 0]
    assert DraftPlan(1, 0.0).take(draft) == 1
    assert DraftPlan(64, 0.6).take(Draft([1, 2, 3], [-1, 0, 1])) == 64


def test_the_costs_of_a_row_and_of_a_plain_step_are_measured() -> None:
    governor = Governor()
    simulate(governor, Machine(linear), Text(constant(0.9)), 300)
    assert governor.plan(1).row_cost == pytest.approx(0.1, abs=0.02)
    assert governor.plan(1).plain_seconds == pytest.approx(3e-3, rel=0.02)


def test_high_load_turns_drafting_down() -> None:
    governor, text = Governor(), Text(constant(0.8))

    def cost(rows: int) -> float:
        return 5e-3 if rows <= 32 else 5e-3 * rows / 32

    simulate(governor, Machine(cost), text, 500)
    alone = plans(governor, Machine(cost), text, 300)
    busy = plans(governor, Machine(cost), text, 300, batch=16)
    flooded = plans(governor, Machine(cost), text, 300, batch=64)
    assert statistics.mean(alone[50:]) > 6
    assert 0.5 < statistics.mean(busy[50:]) < 3
    assert statistics.mean(flooded[50:]) < 0.2


def test_what_was_in_vain_with_many_is_tried_with_few() -> None:
    governor = Governor()
    machine, hopeless, easy = Machine(steep), Text(constant(0.0)), Text(constant(0.9))
    plans(governor, machine, hopeless, 2000, batch=16)
    machine = Machine(flat)
    assert sum(map(bool, plans(governor, machine, easy, 200, batch=2))) > 40


def test_what_was_in_vain_with_few_is_not_tried_at_once_with_more() -> None:
    governor, hopeless = Governor(), Text(constant(0.0))

    def tried(policy: Governor) -> int:
        return sum(map(bool, plans(policy, Machine(linear), hopeless, 60, batch=16)))

    plans(governor, Machine(linear), hopeless, 60)
    assert tried(governor) <= 2 < 6 < tried(Governor())


def test_a_trial_that_prompts_show_to_be_dear_is_not_begun() -> None:
    """With 32 sequences, lookahead's first wide step would have 1,792 rows."""
    told = 1e-3

    def seconds_of(rows: int) -> float:
        return 0.12 + told * rows

    for known in (None, told):
        governor = Governor(widths=(31, 55), ramp=8)
        wide = 0
        for _ in range(60):
            plan = governor.plan(32)
            wide += plan.nodes > 0
            outcome = Outcome(plan, [plan.nodes] * 32, [[]] * 32, 1e-4, None, known)
            governor.learn(replace(outcome, verify_seconds=seconds_of(outcome.rows)))
        assert wide == 0 if known else wide > 0


def test_trials_of_ever_other_widths_are_paid_too() -> None:
    """With 16 sequences, each of lookahead's steps is as wide as the longest draft of the batch."""
    governor, wide = Governor(widths=(31, 55), ramp=8), 0
    for step in range(60):
        plan = governor.plan(16)
        nodes = min(plan.nodes, 31 + 5 * (step % 5))
        wide += nodes > 0
        outcome = Outcome(plan, [nodes] * 16, [[]] * 16, 1e-4, None)
        governor.learn(replace(outcome, verify_seconds=0.1 + 1.5e-3 * outcome.rows))
    assert wide == 1


def test_what_hardly_pays_is_left() -> None:
    """Drafts that would gain two in a hundred, if all was measured exactly."""
    text = Text(constant(1.0), longest=1)

    def seconds_of(rows: int) -> float:
        return 1.0 if rows == 1 else 1.96

    governor = Governor(widths=(1,))
    found = plans(governor, Machine(seconds_of, draft=(0.0, 0.0)), text, 600)
    late = found[len(found) // 2 :]
    assert sum(map(bool, late)) < 0.25 * len(late)


def test_a_busy_machine_that_becomes_idle_is_noticed() -> None:
    governor, text = Governor(), Text(constant(0.7))
    busy = plans(governor, Machine(steep), text, 1000)
    assert statistics.mean(busy[100:]) < 0.1
    idle = plans(governor, Machine(flat), text, 2000)
    assert statistics.mean(idle[-100:]) > 3


def test_acceptance_of_narrow_steps_is_read_off_wide_ones() -> None:
    acceptance = Acceptance((1, 2, 4))
    for path in ([0, 1, 2], [0], [], [0, 1]):
        acceptance.observe(4, [3], [path])
    (one, first, _), (two, second, _), (four, third, there) = acceptance.expected()
    assert (one, two, four) == (1, 2, 4)
    assert first == pytest.approx(0.75, abs=0.06)
    assert second - first == pytest.approx(0.5, abs=0.06)
    assert third - second == pytest.approx(0.25, abs=0.06)
    assert there == pytest.approx(0.5, abs=0.06)


def test_what_was_right_far_down_is_forgotten() -> None:
    acceptance = Acceptance((1, 2, 4))
    for _ in range(40):
        acceptance.observe(4, [4], [[0, 1, 2, 3]])
    for _ in range(300):
        acceptance.observe(1, [1], [[]])
    assert acceptance.expected()[-1][1] < 0.01


def test_nodes_that_failed_once_are_tried_again_when_those_before_them_are_right() -> None:
    acceptance = Acceptance(WIDTHS)
    acceptance.observe(4, [4], [[0]])
    for _ in range(12):
        acceptance.observe(2, [2], [[0, 1]])
    (_, two, _), _, (width, four, _) = acceptance.expected()[1:4]
    assert width == 4
    assert four - two > 1.2  # of two nodes


def test_a_dear_second_row_does_not_keep_drafts_narrow() -> None:
    for seed in range(5):
        text = Text(constant(0.85), found=0.7)
        whole = simulate(Governor(), Machine(jump, draft=(100e-6, 0.0)), text, 128, seed=seed)
        fixed = simulate(Pinned(8), Machine(jump, draft=(100e-6, 0.0)), text, 128, seed=seed)
        assert whole < 1.3 * fixed


def test_a_batch_counts_its_mean_acceptance_and_its_longest_draft() -> None:
    acceptance = Acceptance((1, 2))
    for _ in range(50):
        acceptance.observe(2, [2, 0, 1, 0], [[0, 1], [], [0], []])
    (_, first, one), (_, second, two) = acceptance.expected()
    assert first == pytest.approx(0.5, abs=0.02)
    assert second == pytest.approx(0.75, abs=0.02)
    assert one == two == pytest.approx(1.0)


def test_plans_are_widths_that_make_sense() -> None:
    noted = plans(Governor(widths=(5, 9, 40)), Machine(flat), Text(constant(0.9)), 1000)
    assert {5, 9, 40} >= {*noted} - {0}
    assert 40 in noted
    assert {*plans(Governor(), Machine(recorded), Text(constant(0.8)), 500)} <= {0, *WIDTHS}


def test_costs_that_were_saved_are_known_at_once() -> None:
    text = Text(constant(0.8))
    governor = Governor(drafter="x")
    simulate(governor, Machine(recorded), text, 1000)
    costs = json.loads(json.dumps(governor.costs()))
    again = Governor(drafter="x")
    again.begin_with(costs)
    assert again.costs() == governor.costs()
    # Rows that cost a step each: known without trying, and so are wrong seconds, once a step was measured.
    for scale in (3e-3, 1.0, 1e-6):
        steeper = Governor()
        steeper.begin_with({"verify": {"1": [[rows, scale * rows] for rows in range(1, 20)]}})
        noted = plans(steeper, Machine(steep), text, 400)
        assert sum(noted) < 60, scale


@pytest.mark.parametrize("first", [Governor((4, 8), 3, "x"), FullOrNarrow((4, 8), (30, 35), 3, "x")])
def test_a_governor_again_knows_the_costs_and_not_the_text(first: Governor) -> None:
    simulate(first, Machine(linear), Text(constant(0.9)), 400)
    again = first.again()
    assert type(again) is type(first) and (again.widths, again.ramp) == (first.widths, first.ramp)
    assert again.costs() == first.costs()
    assert not any(again.acceptance._tries)


@pytest.mark.parametrize("costs", [{}, {"verify": 3}, {"verify": {"1": [[1]]}}, {"verify": {"a": []}}])
def test_costs_of_nonsense_are_refused(costs: dict[str, object]) -> None:
    with pytest.raises(OutpaceError, match="the measured costs cannot be read"):
        Governor().begin_with(costs)


@pytest.mark.parametrize("widths", [(), (0, 1), (2, 1), (1, 1), (-1,)])
def test_widths_are_ascending_numbers_above_0(widths: tuple[int, ...]) -> None:
    with pytest.raises(OutpaceError, match="ascending"):
        Governor(widths=widths)


def test_other_mistakes_are_refused() -> None:
    with pytest.raises(OutpaceError, match="ramp"):
        Governor(ramp=0)
    with pytest.raises(OutpaceError, match="nodes must be at least 0"):
        Pinned(-1)
