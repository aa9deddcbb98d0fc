"""Prompt lookup: the matches that are followed, the branches of the draft, the weight of a match."""

from __future__ import annotations

import pytest

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.draws.noise import Key
from outpace.engine.engine import Engine
from outpace.sequence import Sequence
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import is_chain
from paths import distinct_paths


def draft(text: list[int], eos: frozenset[int] = frozenset(), **options: float) -> Draft:
    sequence = Sequence(text, SamplingParams(), Key(0), limit=100, eos_token_ids=eos)
    drafter = PromptLookup(**options)  # type: ignore[arg-type]
    return drafter.draft(drafter.start(sequence, None))


@pytest.mark.parametrize(
    "drafter",
    [
        PromptLookup(),
        PromptLookup(max_ngram=1, branches=2),
        PromptLookup(branches=1, num_speculative_tokens=3, min_confidence=0),
    ],
)
def test_it_keeps_the_contract(drafter: PromptLookup) -> None:
    check_drafter(drafter)


def test_drafts_what_followed_before() -> None:
    found = draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], num_speculative_tokens=4)
    assert (list(found.tokens), list(found.parents)) == ([4, 5, 6, 7], [-1, 0, 1, 2])


def test_drafts_nothing_where_nothing_matches() -> None:
    assert len(draft([1, 2, 3, 4])) == 0
    assert len(draft([7])) == 0
    assert len(draft([1, 2, 3, 9, 1], min_ngram=2)) == 0


def test_a_loop_goes_on_past_the_end_of_the_text() -> None:
    assert list(draft([1, 2, 1, 2, 1, 2], num_speculative_tokens=5).tokens) == [1, 2, 1, 2, 1]
    assert list(draft([4, 4], num_speculative_tokens=3, min_confidence=0).tokens) == [4, 4, 4]


def test_branches_where_matches_differ() -> None:
    text = [1, 2, 3, 50, 60, 1, 2, 3, 70, 80, 1, 2, 3]
    found = draft(text, min_confidence=0.15)
    # The latest of two matches of one length comes first and is followed further.
    assert found.tokens[0] == 70
    assert {(50,), (70,), (70, 80)} <= distinct_paths(found)
    assert list(draft(text, branches=1).tokens[:5]) == [70, 80, 1, 2, 3]


def test_matches_that_agree_are_one_branch() -> None:
    found = draft([1, 2, 3, 4, 8, 1, 2, 3, 4, 9, 1, 2], min_confidence=0.1)
    assert found.tokens[:2] == [3, 4]
    assert {(3, 4, 8), (3, 4, 9)} <= distinct_paths(found)


def test_a_longer_match_comes_before_a_later_one() -> None:
    found = draft([1, 2, 3, 50, 9, 3, 60, 8, 1, 2, 3])
    assert found.tokens[0] == 50
    assert (60,) not in distinct_paths(draft([1, 2, 3, 50, 9, 3, 60, 8, 1, 2, 3], min_confidence=0.2))


def test_a_weak_match_deserves_few_tokens() -> None:
    weak = draft([1, 20, 21, 22, 23, 24, 25, 26, 27, 28, 9, 1])
    strong = draft([1, 2, 3, 4, 5, 21, 22, 23, 24, 25, 26, 27, 28, 29, 9, 1, 2, 3, 4, 5])
    assert 0 < len(weak) < len(strong)
    assert len(draft([1, 20, 21, 22, 9, 1], min_confidence=0.5)) == 0


def test_no_more_tokens_than_allowed() -> None:
    text = [token for start in range(6) for token in (1, 2, 3, 10 + start, 20 + start)] + [1, 2, 3]
    for budget in (1, 2, 7):
        assert len(draft(text, num_speculative_tokens=budget, min_confidence=0.0)) == budget


def test_goes_no_further_than_a_token_that_ends_the_text() -> None:
    assert list(draft([1, 2, 3, 0, 5, 1, 2], eos=frozenset([0])).tokens) == [3, 0]


def test_one_branch_makes_chains() -> None:
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=2, ignore_eos=True)
    (found,) = Engine(ToyTarget(), PromptLookup(branches=1), "rejection").generate([[1, 2, 1, 2]], params)
    assert found.stats.accepted > 0
    assert is_chain(draft([1, 2, 3, 1, 2, 4, 1, 2], branches=1).parents)


def test_the_output_is_looked_up_too() -> None:
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    (found,) = Engine(ToyTarget(surprise=0.3), PromptLookup(), adaptive=False).generate([[5]], params)
    assert found.stats.mean_accepted_length > 2


@pytest.mark.parametrize(
    "options",
    [
        {"min_ngram": 0},
        {"max_ngram": 0},
        {"num_speculative_tokens": 0},
        {"branches": 0},
        {"min_confidence": 1.5},
    ],
)
def test_refuses_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(OutpaceError, match=next(iter(options))):
        PromptLookup(**options)  # type: ignore[arg-type]
