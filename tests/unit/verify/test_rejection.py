"""Rejection by formula, by its limits and by what it refuses; the enumeration sees its bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafts import always, fixed, sampled, table, trees
from enumeration import (
    EXACT,
    WRONG,
    Enumerated,
    Script,
    difference,
    error,
    expected_length,
    output_distribution,
    plain_distribution,
)
from outpace.core import Draft, OutpaceError, Verdict
from outpace.draws.logits import Logits
from outpace.verify import rejection as module
from outpace.verify.base import proposal
from outpace.verify.match import match
from outpace.verify.rejection import rejection


@settings(max_examples=40)
@given(trees(), st.integers(0, 50))
def test_of_chosen_tokens_it_accepts_as_many_as_match(draft: Draft, seed: int) -> None:
    """A point mass is accepted with the probability that the target draws it; equal siblings are one."""
    target = table(seed, 0.3)
    found = expected_length(rejection, target, fixed(draft))
    assert found == pytest.approx(expected_length(match, target, fixed(draft)), abs=EXACT)


def test_two_of_two_tokens_without_replacement_are_always_enough() -> None:
    """After a rejection the other token is all that is left, of the target as of the draft."""
    target, draft_model = always(0.9, 0.1), always(0.2, 0.8)
    drafts = sampled(draft_model, [-1, -1], replacement=False)
    assert expected_length(rejection, target, drafts) == pytest.approx(1, abs=EXACT)
    drafts = sampled(draft_model, [-1, -1], replacement=True)
    assert expected_length(rejection, target, drafts) == pytest.approx(1 - 0.7 * 0.8, abs=EXACT)


@pytest.mark.parametrize("replacement", [True, False])
def test_more_candidates_are_accepted_more_often(replacement: bool) -> None:
    target, draft_model = table(3), table(103)
    drafts = [sampled(draft_model, [-1] * count, replacement) for count in (1, 2, 3)]
    one, two, three = (expected_length(rejection, target, draft) for draft in drafts)
    assert one < two < three < 1


@pytest.mark.parametrize("temperature", [1.0, 0.2, 0.05])
def test_greedy_is_the_limit_of_temperature_zero(temperature: float) -> None:
    """The text of the most probable tokens takes all the weight as the temperature falls."""
    scores = table(4)
    drafts = sampled(table(104), [-1, -1, 0, 1])
    cold = lambda text: (scores(text).log() / temperature).softmax(-1)  # noqa: E731
    point = lambda text: torch.eye(4, dtype=torch.float64)[scores(text).argmax()]  # noqa: E731
    greedy = output_distribution(rejection, point, drafts, 3)
    ((text, weight),) = greedy.items()
    assert weight == pytest.approx(1, abs=EXACT)
    assert [text[i] for i in range(3)] == [int(scores(text[:i]).argmax()) for i in range(3)]
    found = output_distribution(rejection, cold, drafts, 3)
    assert difference(found, plain_distribution(cold, 3)) < EXACT
    assert (found[text] > 1 - 1e-4) == (temperature < 0.1)


# -- what is refused -------------------------------------------------------------------------------------


def _verify(draft: Draft, target: Any = None) -> Verdict:
    draw = Enumerated(Script([]), target or always(0, 0, 0.5, 0.5), draft)
    return rejection(Logits(torch.empty(len(draft) + 1, 0)), draft, draw)


def test_equal_siblings_without_replacement_are_an_error() -> None:
    row = torch.tensor([0.5, 0.5, 0, 0])
    with pytest.raises(OutpaceError, match="drafted token 1 but gives it probability 0"):
        _verify(Draft([1, 1], [-1, -1], {-1: row}, replacement=False))
    assert _verify(Draft([1, 1], [-1, -1], {-1: row}, replacement=True)).path == []


# -- the enumeration sees what is wrong ------------------------------------------------------------------


class Changed:
    """A draw with one method replaced."""

    def __init__(self, draw: Enumerated, **methods: Callable[..., Any]) -> None:
        self._draw = draw
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draw, name)


def one_accept_draw_for_siblings(logits: Logits, draft: Draft, draw: Enumerated) -> Verdict:
    """Siblings share a uniform number: what rejected the first of them, decides about the second too."""
    drawn: dict[int, tuple[float, float]] = {}

    def accept(probability: float, node: int) -> bool:
        low, high = drawn.get(draft.parents[node], (0.0, 1.0))
        share = min(max((probability - low) / (high - low), 0.0), 1.0)
        accepted = draw.accept(share, node)
        bound = low + share * (high - low)
        drawn[draft.parents[node]] = (low, bound) if accepted else (bound, high)
        return accepted

    return rejection(logits, draft, Changed(draw, accept=accept))  # type: ignore[arg-type]


@pytest.mark.parametrize("replacement", [True, False])
def test_siblings_that_share_an_accept_draw_are_seen(replacement: bool) -> None:
    drafts = sampled(table(103), [-1, -1, -1], replacement)
    assert error(one_accept_draw_for_siblings, table(3), drafts, 2) > WRONG


def _first_only(draft: Draft, parent: int, token: int, like: Tensor) -> Tensor:
    """Chosen siblings are taken for draws from the first one's point mass."""
    first = next(t for t, p in zip(draft.tokens, draft.parents, strict=True) if p == parent)
    return proposal(draft, parent, first, like).clamp(min=1e-9)


def test_a_wrong_point_mass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft([0, 1, 2], [-1, -1, -1])
    monkeypatch.setattr(module, "proposal", _first_only)
    assert error(rejection, table(0), fixed(draft), 2) > WRONG


def test_a_draft_of_the_wrong_distribution_is_seen() -> None:
    """Tokens drawn without replacement, but declared as drawn with it."""
    honest = sampled(table(100), [-1, -1, -1], replacement=False)

    def drafts(script: Script) -> Draft:
        draft = honest(script)
        return Draft(draft.tokens, draft.parents, draft.distributions, replacement=True)

    assert error(rejection, table(0), drafts, 2) > WRONG
