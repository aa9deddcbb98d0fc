"""The parts of ``combined`` that draft: what they add, against the time that they take."""

from __future__ import annotations

import pytest

from outpace.drafters.combined.asking import Asking


def asked(added: float, seconds: float, steps: int = 400, tokens: int = 2) -> Asking:
    """After steps of 2 tokens in 1.25 plain steps' time, in which part 1 drafted."""
    asking = Asking()
    for _ in range(steps):
        asking.took(1, seconds)
        asking.added(1, 0.3, added)
        asking.step(tokens, 1.25)
    return asking


def test_a_part_whose_time_is_not_measured_drafts() -> None:
    assert Asking().pays(1, 0.0, plain=1.0)


@pytest.mark.parametrize(("added", "pays"), [(0.15, False), (0.17, True)])
def test_a_part_pays_if_it_adds_more_than_its_time_is_worth(added: float, pays: bool) -> None:
    # A tenth of a plain step, at 1.6 tokens per plain step.
    asking = asked(added, seconds=0.1)
    assert asking.speed == pytest.approx(1.6, rel=1e-3)
    assert asking.pays(1, 0.3, plain=1.0) == pays
    assert asking.pays(1, 0.3, plain=10.0) and not asking.pays(1, 0.3, plain=0.01)


def test_no_part_is_worth_less_than_plain_decoding() -> None:
    asking = asked(0.09, seconds=0.1, tokens=1)
    assert asking.speed == 1.0
    assert not asking.pays(1, 0.3, plain=1.0)


def test_gains_are_measured_by_part_and_by_how_sure_earlier_parts_are() -> None:
    asking = asked(0.0, seconds=0.1)
    asking.took(2, 0.1)
    assert not asking.pays(1, 0.3, plain=1.0) and not asking.pays(1, 0.26, plain=1.0)
    assert asking.pays(1, 0.6, plain=1.0) and asking.pays(2, 0.3, plain=1.0)


def test_a_part_that_adds_again_is_asked_again() -> None:
    asking = asked(0.0, seconds=0.1)
    steps = 0
    while not asking.pays(1, 0.3, plain=1.0):
        asking.added(1, 0.3, 0.8)
        steps += 1
    assert 8 < steps < 20


def test_interruptions_do_not_count_as_time() -> None:
    asking = Asking()
    asking.took(1, 9.0)
    for step in range(100):
        asking.took(1, 5.0 if step % 4 == 3 else 0.1)
    assert 0.08 < asking.cost(1) < 0.15
