"""Block verification of trees is exact, is ``block`` on a chain, and accepts more than ``rejection``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafts import always, chain_shape, fixed, height, sampled, table, trees
from enumeration import EXACT, Enumerated, Script, error, expected_length
from outpace.core import Draft
from outpace.draws.logits import Logits
from outpace.verify.match import match
from outpace.verify.rejection import rejection
from outpace_lab.verify.block import block
from outpace_lab.verify.traversal import traversal


@pytest.mark.parametrize("seed", range(6))
def test_on_a_chain_it_is_block_verification(seed: int) -> None:
    target, drafts = table(seed), sampled(table(seed + 100), chain_shape(3))
    found = expected_length(traversal, target, drafts)
    assert found == pytest.approx(expected_length(block, target, drafts), abs=EXACT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("replacement", [True, False])
def test_it_accepts_more_of_a_tree_than_rejection(seed: int, replacement: bool) -> None:
    target, drafts = table(seed), sampled(table(seed + 100), [-1, -1, 0, 1], replacement)
    assert expected_length(traversal, target, drafts) > expected_length(rejection, target, drafts)


@pytest.mark.parametrize("parents", [[-1, -1, 1], [-1, -1, 0, 1], [-1, -1, 1, 2], [-1, 0, 0, 2]])
def test_equal_siblings_drawn_with_replacement_lend_each_other_their_children(parents: list[int]) -> None:
    """With two tokens many siblings are equal."""
    for seed in range(6):
        target, drafts = table(seed, vocabulary=2), sampled(table(seed + 100, vocabulary=2), parents)
        found = expected_length(traversal, target, drafts)
        assert found > expected_length(rejection, target, drafts) - EXACT
        assert error(traversal, target, drafts, height(parents) + 1) < EXACT


@pytest.mark.parametrize("verify", [traversal, rejection])
def test_a_path_through_the_second_of_two_equal_siblings(verify: Any) -> None:
    sure = {(): 1, (1,): 3, (1, 3): 0}
    target = lambda text: torch.eye(4, dtype=torch.float64)[sure[text]]  # noqa: E731
    half = torch.tensor([0.0, 0.5, 0, 0.5], dtype=torch.float64)
    for rows in (None, {-1: half, 1: half}):
        draft = Draft([1, 1, 3], [-1, -1, 1], rows)
        verdict = verify(Logits(torch.empty(4, 0)), draft, Enumerated(Script([]), target, draft))
        assert (verdict.path, verdict.tokens) == ([1, 2], [1, 3, 0])


@settings(max_examples=40)
@given(trees(), st.integers(0, 50))
def test_chosen_tokens_are_accepted_as_by_match(draft: Draft, seed: int) -> None:
    """A point mass is drafted with certainty, so nothing can make up for a token that the target rejects."""
    target = table(seed, 0.3)
    found = expected_length(traversal, target, fixed(draft))
    assert found == pytest.approx(expected_length(match, target, fixed(draft)), abs=EXACT)


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
