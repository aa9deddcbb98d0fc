"""One of two drafters per step: the one that copies where its draft is worth more."""

from __future__ import annotations

import pytest

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters import load_drafter
from outpace.drafters.combined.either import Either, EitherState, Reached, _wins
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import chain

SPEC = "either:(suffix:memory=0)+(jacobi:num_speculative_tokens=4)"
PARAMS = SamplingParams(max_new_tokens=60, ignore_eos=True)


def test_it_keeps_the_contract() -> None:
    check_drafter(load_drafter(SPEC))


def test_each_part_drafts_where_it_is_worth_more() -> None:
    engine = Engine(ToyTarget(), SPEC, adaptive=False)
    counts = engine.generate([[3, 1, 4, 1, 5, 9, 2, 6]], PARAMS)[0].stats.extra
    assert counts["suffix_drafted"] and counts["jacobi_drafted"]


@pytest.mark.parametrize(
    ("chances", "wins"), [((), False), ((0.9, 0.8, 0.7, 0.6), True), ((0.5, 0.2), False)]
)
def test_a_draft_is_weighed_by_its_chances_and_what_the_other_reaches(
    chances: tuple[float, ...], wins: bool
) -> None:
    engine = Engine(ToyTarget())
    sequence = engine.add([3, 1, 4], PARAMS)
    state = EitherState(sequence, Reached())  # which begins with two tokens per step's time
    tokens = [1] * len(chances)
    draft = Draft(tuple(tokens), chain(tokens).parents, chances=chances)
    assert _wins(draft, state) == wins  # without costs
    sequence.plain_seconds, sequence.row_cost = 1.0, 0.05
    assert _wins(draft, state) == wins
    for _ in range(100):
        state.reached.step(tokens=5, time=1.0)
    assert not _wins(draft, state)


def test_it_takes_two_drafters() -> None:
    with pytest.raises(OutpaceError, match="two drafters"):
        Either((load_drafter("suffix"),))
