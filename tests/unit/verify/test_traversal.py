"""Block verification of trees is exact, is ``block`` on a chain, and accepts more than ``rejection``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafts import always, chain_shape, fixed, sampled, table
from enumeration import EXACT, Enumerated, Script, expected_length
from outpace.core import Draft
from outpace.logits import Logits
from outpace.verify.block import block
from outpace.verify.match import match
from outpace.verify.rejection import rejection
from outpace.verify.traversal import traversal


@pytest.mark.parametrize("seed", range(6))
def test_on_a_chain_it_is_block_verification(seed: int) -> None:
    target, drafts = table(seed), sampled(table(seed + 100), chain_shape(3))
    found = expected_length(traversal, target, drafts)
    assert found == pytest.approx(expected_length(block, target, drafts), abs=EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_it_accepts_more_of_a_tree_than_rejection(seed: int) -> None:
    """Drawn without replacement: with it, equal siblings share their children there alone."""
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
