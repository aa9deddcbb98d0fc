"""Drafts in plain steps: when they are offered, how many nodes they have, and what they may lose."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import pytest

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.base import SequenceDrafter
from outpace.engine.engine import Engine
from outpace.policy.governor import Governor
from outpace.policy.plan import DraftPlan, Outcome
from outpace.policy.sure import WIDTHS, Account, Sure
from outpace.sequence import Sequence
from outpace.testing import ToyTarget

DEAR = {1: 1.0, 2: 2.3, 4: 2.8, 8: 4.8, 16: 7.4, 32: 13.8}  # seconds by rows: a second row costs a plain step
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)


def seconds(rows: int) -> float:
    return DEAR[min(width for width in DEAR if width >= rows)]


@pytest.mark.parametrize(
    ("chances", "nodes"),
    [
        ([], 0),
        ([0.9, 0.8, 0.7], 3),
        ([0.9, 0.8, 0.0, 0.0], 0),  # (1 + 1.7) / 2.8
        ([0.99, 0.98, 0.97, 0.2, 0.2, 0.2, 0.2], 3),
        ([0.98**depth for depth in range(1, 16)], 15),
    ],
)
def test_the_nodes_with_the_most_tokens_per_time_are_taken(chances: Seq[float], nodes: int) -> None:
    sure = Sure(tuple(seconds(1 + width) for width in WIDTHS))
    assert sure.take(chances) == nodes
    assert (
        DraftPlan(31, sure=sure).take(
            Draft(range(len(chances)), range(-1, len(chances) - 1), chances=chances)
        )
        == nodes
    )
    assert DraftPlan(31, sure=sure).take(Draft([1], [-1])) == 0  # a draft without chances is not sure


def test_only_a_draft_that_may_pay_is_asked_for() -> None:
    prices = tuple(seconds(1 + width) for width in WIDTHS)
    assert Sure(prices).least == 0.8
    assert Sure(prices, factor=0.5).least == math.inf
    assert Sure(tuple(price / 2 for price in prices)).least == 0.5


def test_chances_that_do_not_come_true_count_for_less() -> None:
    account = Account(5.0, 0.01)
    assert account.factor == 1.0
    account.observe(8.0, 0)
    failed = account.factor
    assert failed < 0.7
    account.observe(8.0, 15)
    assert failed < account.factor <= 1.0
    account.observe(8.0, 0)
    low = account.factor
    for _ in range(200):
        account.forget()
    assert low < 0.9 < account.factor


def decode(governor: Governor, steps: int, chance: float, right: int) -> tuple[float, int, int]:
    """Seconds, tokens and sure drafts of steps in which 15 nodes with a chance are proposed."""
    spent, tokens, drafts = 0.0, 0, 0
    for _ in range(steps):
        plan = governor.plan(1)
        size = path = 0
        if plan.sure is not None and chance >= plan.sure.least:
            plan = DraftPlan(plan.sure.nodes, sure=plan.sure)
            size = plan.sure.take([chance**depth for depth in range(1, 16)]) if plan.sure else 0
            drafts += size > 0
        elif plan.nodes:
            size = 1  # other drafts are wrong
        if plan.sure is not None and plan.nodes:
            path = min(right, size)
        stated = sum(chance**depth for depth in range(1, size + 1))
        governor.learn(Outcome(plan, [size], [range(path)], 0.001, seconds(1 + size), None, stated))
        spent, tokens = spent + seconds(1 + size), tokens + 1 + path
    return spent, tokens, drafts


def test_where_narrow_drafts_cannot_pay_sure_ones_do() -> None:
    spent, tokens, drafts = decode(Governor(), 100, 0.97, 15)
    assert drafts > 80 and tokens > 1.8 * spent
    assert decode(Governor(), 100, 0.7, 15)[2] == 0  # not sure enough


def test_sure_drafts_that_fail_lose_little() -> None:
    for steps in (300, 3000):
        spent, tokens, drafts = decode(Governor(), steps, 0.97, 0)
        assert drafts > 1
        # Two accounts of five plain steps and a hundredth of the time, each overdrawn by a draft at most.
        assert spent < 1.03 * tokens + 30


def test_gains_pay_for_a_wide_draft_that_fails() -> None:
    governor = Governor()
    decode(governor, 100, 0.97, 15)
    assert decode(governor, 1, 0.97, 0)[2] == 1
    spent, tokens, drafts = decode(governor, 40, 0.97, 15)
    assert drafts > 30 and tokens > 1.5 * spent


def test_nothing_is_offered_to_several_sequences_or_before_a_measurement() -> None:
    governor = Governor()
    assert governor.plan(1).sure is None
    decode(governor, 200, 0.0, 0)
    assert governor.plan(1).sure is not None
    governor.learn(Outcome(DraftPlan(0), [0], [[]], 0.0, 1.0))
    assert governor.plan(2).sure is None


@dataclass
class Offering:
    """A policy of plain steps with an offer."""

    sure: Sure = field(default_factory=lambda: Sure((0.1,) * len(WIDTHS)))
    timed: bool = False
    seen: list[Outcome] = field(default_factory=list)

    def plan(self, batch: int) -> DraftPlan:
        return DraftPlan(0, sure=self.sure)

    def learn(self, outcome: Outcome) -> None:
        self.seen.append(outcome)


@dataclass(frozen=True)
class Promising(SequenceDrafter[Sequence]):
    chance: float = 0.9
    wrong: bool = False

    def start(self, sequence: Sequence, shared: object) -> Sequence:
        return sequence

    def promise(self, state: Sequence) -> float:
        if self.wrong:
            raise OutpaceError("no promise")
        return self.chance

    def draft(self, state: Sequence) -> Draft:
        assert state.budget == WIDTHS[-1]
        last = state.tokens[-1]
        return Draft([last, (last + 1) % 32, 3], [-1, 0, 1], chances=[self.chance, 0.4, 0.1])


def test_an_engine_drafts_what_is_sure_and_the_tokens_stay() -> None:
    plain = Engine(ToyTarget(context=None)).generate([[5, 6]], PARAMS)[0]
    policy = Offering()
    found = Engine(ToyTarget(context=None), Promising(), adaptive=policy).generate([[5, 6]], PARAMS)[0]
    assert found.tokens == plain.tokens
    assert found.stats.drafted > 60
    assert max(outcome.stated for outcome in policy.seen) == pytest.approx(1.4)
    assert {outcome.plan.nodes for outcome in policy.seen} == {WIDTHS[-1]}

    unsure = Engine(ToyTarget(context=None), Promising(0.4), adaptive=Offering()).generate([[5, 6]], PARAMS)[
        0
    ]
    assert (unsure.tokens, unsure.stats.drafted) == (plain.tokens, 0)
    several = Engine(ToyTarget(context=None), Promising(), adaptive=Offering())
    both = several.generate([[5, 6], [7, 8]], PARAMS)
    assert both[0].tokens == plain.tokens and both[0].stats.drafted == 0


def test_a_promise_that_fails_ends_its_sequence_alone() -> None:
    engine = Engine(ToyTarget(context=None), Promising(wrong=True), adaptive=Offering())
    found = engine.generate([[5, 6]], PARAMS, errors="return")[0]
    assert str(found.error) == "no promise"
