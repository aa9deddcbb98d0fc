"""The parts of ``combined`` that draft: what they add, against the time that they take."""

from __future__ import annotations

import pytest

from outpace.drafters.combined.gains import Gains


def measured(added: float, seconds: float, steps: int = 400, tokens: int = 2) -> Gains:
    """After steps of 2 tokens in 1.25 plain steps' time, in which part 1 drafted."""
    gains = Gains()
    for _ in range(steps):
        gains.took(1, seconds)
        gains.added(1, 0.3, added)
        gains.step(tokens, 1.25)
    return gains


def test_a_part_whose_time_is_not_measured_drafts() -> None:
    assert Gains().pays(1, 0.0, plain=1.0)


@pytest.mark.parametrize(("added", "pays"), [(0.15, False), (0.17, True)])
def test_a_part_pays_if_it_adds_more_than_its_time_is_worth(added: float, pays: bool) -> None:
    # A tenth of a plain step, at 1.6 tokens per plain step.
    gains = measured(added, seconds=0.1)
    assert gains.speed == pytest.approx(1.6, rel=1e-3)
    assert gains.pays(1, 0.3, plain=1.0) == pays
    assert gains.pays(1, 0.3, plain=10.0) and not gains.pays(1, 0.3, plain=0.01)


def test_no_part_is_worth_less_than_plain_decoding() -> None:
    gains = measured(0.09, seconds=0.1, tokens=1)
    assert gains.speed == 1.0
    assert not gains.pays(1, 0.3, plain=1.0)


def test_gains_are_measured_by_part_and_by_how_sure_earlier_parts_are() -> None:
    gains = measured(0.0, seconds=0.1)
    gains.took(2, 0.1)
    assert not gains.pays(1, 0.3, plain=1.0) and not gains.pays(1, 0.26, plain=1.0)
    assert gains.pays(1, 0.6, plain=1.0) and gains.pays(2, 0.3, plain=1.0)


def test_a_part_that_adds_again_is_asked_again() -> None:
    gains = measured(0.0, seconds=0.1)
    steps = 0
    while not gains.pays(1, 0.3, plain=1.0):
        gains.added(1, 0.3, 0.8)
        steps += 1
    assert 8 < steps < 20


@pytest.mark.parametrize("other", [5.0, 0.001], ids=["interrupted", "short"])
def test_few_other_times_do_not_count(other: float) -> None:
    gains = Gains()
    for step in range(40):
        gains.took(1, other if step % 4 == 3 else 0.1)
        assert gains.cost(1) == 0.1
