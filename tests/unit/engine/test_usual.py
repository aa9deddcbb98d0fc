"""The drafter where none is named: it fits every target and verifier, and keeps nothing for later texts."""

from __future__ import annotations

import pytest

import outpace
from outpace.core import DEFAULT_DRAFTER, SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.usual import usual, usual_drafter
from outpace.targets.plan import StepPlan
from outpace.testing import ToyTarget
from outpace.verify import VERIFIERS

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PARAMS = SamplingParams(max_new_tokens=60, ignore_eos=True)


def steps_of(drafter: str) -> list[int]:
    """Steps of one text, decoded twice by one engine."""
    engine = Engine(ToyTarget(), drafter, adaptive=False)
    return [engine.generate([PROMPT], PARAMS)[0].stats.steps for _ in range(2)]


def test_nothing_of_a_text_is_kept_for_the_next() -> None:
    first, second = steps_of(DEFAULT_DRAFTER)
    assert first == second < PARAMS.max_new_tokens
    remembering = steps_of("suffix")  # whose options are otherwise the same
    assert remembering[0] == first and remembering[1] < second


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_verifier_takes_it(verifier: str) -> None:
    engine = Engine(ToyTarget(), usual_drafter(ToyTarget(), verifier), verifier, adaptive=False)
    assert engine.generate([PROMPT], PARAMS)[0].stats.accepted
    assert engine.drafter.trees != engine.verifier.chains


def test_a_target_of_chains_gets_chains() -> None:
    target = ToyTarget()
    target.why_chains_only = "its positions cannot be set"
    drafter = Engine(target, usual_drafter(target)).drafter
    assert not drafter.trees and outpace.load_drafter(f"{DEFAULT_DRAFTER},branches=1") == drafter


class Trial(ToyTarget):
    """A target whose trial of rounded weights is known."""

    def __init__(self, *costs: float) -> None:
        super().__init__()
        self.plan = StepPlan("native")
        self.costs = costs

    def rounded_costs(self) -> tuple[float, float]:
        if not self.costs:
            return super().rounded_costs()
        return self.costs[0], self.costs[1]


def test_self_joins_where_a_trial_says_that_it_pays() -> None:
    quick, slow = Trial(1.05, 0.4), Trial(1.05, 0.8)
    assert (
        usual(quick).spec == f"either:({DEFAULT_DRAFTER})+(self)" and "0.40 of a step" in usual(quick).because
    )
    assert usual(slow).spec == DEFAULT_DRAFTER and "gains too little" in usual(slow).because
    assert usual(Trial()).spec == DEFAULT_DRAFTER and "no rounded self" in usual(Trial()).because
    for verifier in ("rejection", "block"):
        assert usual(quick, verifier).spec.startswith(DEFAULT_DRAFTER)
    assert usual(quick, changes=True).spec == DEFAULT_DRAFTER
    quick.plan = StepPlan("stock")
    assert usual(quick).spec == DEFAULT_DRAFTER and "native steps" in usual(quick).because
