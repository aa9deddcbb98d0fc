"""LogitSpec in suffix: guesses from the last logits, copies behind them, and how chances are learnt."""

from __future__ import annotations

import pytest
import torch

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.copying.guesses import NextGuesses
from outpace.drafters.copying.suffix import Suffix, SuffixState
from outpace.draws.logits import Logits
from outpace.draws.noise import Key
from outpace.sequence import Sequence, Step
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import path_to

TEXT = [7, 8, 9, 1, 2, 4]


def after(best: list[int], drafter: Suffix) -> tuple[SuffixState, Draft]:
    """The draft after a step that emits the first of these tokens, the best ones of its logits in order."""
    sequence = Sequence(TEXT, SamplingParams(), Key(0), limit=100, eos_token_ids=frozenset())
    state = drafter.start(sequence, drafter.prepare(ToyTarget()))
    row = torch.zeros(1, 40)
    row[0, best] = torch.arange(len(best), 0, -1).float()
    sequence.append(best[0])
    drafter.learn(state, Step(Draft(), (), [], [best[0]], Logits(row), 0, sequence, {}))
    return state, drafter.draft(state)


@pytest.mark.parametrize(
    "drafter", [Suffix(guesses=8), Suffix(guesses=1, memory=0, min_confidence=0.0, branches=1)]
)
def test_it_keeps_the_contract(drafter: Suffix) -> None:
    check_drafter(drafter)


def test_the_best_tokens_of_the_last_logits_are_guessed_and_looked_up() -> None:
    """The root is new, so nothing followed it; a guess is in the text, another is not."""
    _, draft = after([5, 7, 30], Suffix(guesses=2, memory=0, min_confidence=0.0))
    paths = {tuple(draft.tokens[one] for one in path_to(draft.parents, node)) for node in range(len(draft))}
    assert {(7,), (30,), (7, 8), (7, 8, 9)} <= paths and not any(path[0] == 5 for path in paths)
    assert {path[0] for path in paths} == {7, 30} and (30, 7) not in paths


def test_the_token_that_was_emitted_is_no_guess_and_others_keep_their_order() -> None:
    state, _ = after([5, 30, 31, 32], Suffix(guesses=2))
    assert state.guesses.tokens == [30, 31]


def test_chances_follow_from_how_often_a_rank_was_right() -> None:
    guesses = NextGuesses([3, 4])
    before = [guesses.chance(rank) for rank in range(3)]
    assert before == sorted(before, reverse=True)
    for _ in range(50):
        guesses.count(4)
    assert guesses.chance(1) > 0.8 > 0.1 > guesses.chance(0)
    guesses.tokens = []
    guesses.count(4)
    assert guesses.chance(1) > 0.8


def test_unlikely_guesses_are_not_drafted() -> None:
    _, draft = after([5, 30, 31, 32], Suffix(guesses=3, min_confidence=0.5))
    assert not len(draft)
    with pytest.raises(OutpaceError, match="guesses must be at least 0"):
        Suffix(guesses=-1)
