"""Block verification of trees is exact, is ``block`` on a chain, and accepts more than ``rejection``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafts import always, chain_shape, fixed, height, sampled, shapes, table, trees
from enumeration import (
    Enumerated,
    Script,
    difference,
    expected_length,
    output_distribution,
    plain_distribution,
)
from outpace.core import Draft, OutpaceError
from outpace.sampling import Logits
from outpace.verify import traversal as module
from outpace.verify.block import block
from outpace.verify.match import match
from outpace.verify.rejection import rejection
from outpace.verify.traversal import traversal

EXACT = 1e-12
WRONG = 1e-3
# Vocabulary -> nodes of a sampled tree, so that there are not too many drafts.
SIZES = {3: 5, 4: 4, 5: 3}


@settings(max_examples=40)
@given(
    st.data(),
    st.sampled_from([3, 4, 5]),
    st.booleans(),
    st.integers(0, 50),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([None, 1]),
)
def test_trees_of_sampled_candidates(
    data: st.DataObject, vocabulary: int, replacement: bool, seed: int, zeros: float, eos: int | None
) -> None:
    parents = data.draw(shapes(SIZES[vocabulary]))
    target, draft_model = table(seed, zeros, vocabulary), table(seed + 100, zeros, vocabulary)
    length = height(parents) + 1
    found = output_distribution(traversal, target, sampled(draft_model, parents, replacement), length, eos)
    assert difference(found, plain_distribution(target, length, eos)) < EXACT


@settings(max_examples=40)
@given(st.data(), st.sampled_from([4, 5]), st.integers(0, 50), st.sampled_from([None, 1]))
def test_trees_of_chosen_tokens(data: st.DataObject, vocabulary: int, seed: int, eos: int | None) -> None:
    draft = data.draw(trees(vocabulary))
    target = table(seed, 0.3, vocabulary)
    found = output_distribution(traversal, target, fixed(draft), 4, eos)
    assert difference(found, plain_distribution(target, 4, eos)) < EXACT


@pytest.mark.parametrize("seed", range(6))
def test_on_a_chain_it_is_block_verification(seed: int) -> None:
    target, drafts = table(seed), sampled(table(seed + 100), chain_shape(3))
    found = expected_length(traversal, target, drafts)
    assert found == pytest.approx(expected_length(block, target, drafts), abs=EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_it_accepts_more_of_a_tree_than_rejection(seed: int) -> None:
    """Drawn without replacement: with it, equal siblings lend each other their children there alone."""
    target, drafts = table(seed), sampled(table(seed + 100), [-1, -1, 0, 1], replacement=False)
    assert expected_length(traversal, target, drafts) > expected_length(rejection, target, drafts)


def test_one_path_of_chosen_tokens_is_accepted_as_by_match() -> None:
    """A point mass is drafted with certainty, so nothing can make up for a token that the target rejects."""
    target, draft = table(5), fixed(Draft([1, 2, 0, 3], [-1, 0, 0, -1]))
    found = expected_length(traversal, target, draft)
    assert found == pytest.approx(expected_length(match, target, draft), abs=EXACT)


class Silent(Enumerated):
    """A draw of a target that is certain of one token; it checks no texts, which are long."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(Script([]), always(0, 1, 0, 0), draft)

    def distribution(self, logits: Logits, node: int, guessed: Any = ()) -> Tensor:
        return self._target(())


def test_a_deep_draft_does_not_exhaust_the_stack() -> None:
    length = 1500
    draft = Draft([1] * length, chain_shape(length))
    verdict = traversal(Logits(torch.empty(length + 1, 0)), draft, Silent(draft))
    assert len(verdict.path) == length


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([1], [-1], {-1: torch.tensor([1.0, 0, 0, 0])}), "drafted token 1 but gives it probability 0"),
        (Draft([0, 1], [-1, 0], {-1: torch.tensor([1.0, 0, 0, 0])}), "no distribution for the children of"),
    ],
)
def test_impossible_drafts_are_errors(draft: Draft, message: str) -> None:
    draw = Enumerated(Script([]), always(1, 0, 0, 0), draft)
    with pytest.raises(OutpaceError, match=message):
        traversal(Logits(torch.empty(len(draft) + 1, 0)), draft, draw)


def _kept(p: Tensor, token: int) -> Tensor:
    return p


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("standing", lambda share, excess: share),
        ("standing", lambda share, excess: excess),
        ("without", _kept),
        ("likelihood_ratio", lambda q, p, token: min(1.0, float(q[token] / p[token]))),
    ],
)
def test_a_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, bug: Callable[..., Any]) -> None:
    target, drafts = table(3), sampled(table(103), [-1, -1, 0, 1], replacement=False)
    monkeypatch.setattr(module, name, bug)
    found = output_distribution(traversal, target, drafts, 3)
    assert difference(found, plain_distribution(target, 3)) > WRONG
