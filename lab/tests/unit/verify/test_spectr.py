"""k-sequential selection is exact, its gamma is the least valid one, and it is near the best transport."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from drafts import always, fixed, sampled, table, trees
from enumeration import EXACT, Enumerated, Script, error, expected_length
from outpace.core import Draft, OutpaceError
from outpace.drafters import load_drafter
from outpace.drafters.models.draft_model import DraftModel
from outpace.draws.logits import Logits
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget
from outpace.verify.rejection import rejection
from outpace_lab.verify.spectr import division_factor, spectr


def test_equal_siblings_lend_each_other_their_children() -> None:
    """Both children of the root are the same; only the second has a child, the target's token."""
    sure = {(): 1, (1,): 3, (1, 3): 0}
    target = lambda text: torch.eye(4, dtype=torch.float64)[sure[text]]  # noqa: E731
    half = torch.tensor([0.0, 0.5, 0, 0.5], dtype=torch.float64)
    draft = Draft([1, 1, 3], [-1, -1, 1], {-1: half, 1: half})
    for verify in (spectr, rejection):
        verdict = verify(Logits(torch.empty(4, 0)), draft, Enumerated(Script([1]), target, draft))
        assert (verdict.path, verdict.tokens) == ([1, 2], [1, 3, 0])


@settings(max_examples=30)
@given(st.data(), st.sampled_from([4, 5]), st.integers(0, 50))
def test_chosen_tokens_are_tried_as_by_rejection(data: st.DataObject, vocabulary: int, seed: int) -> None:
    draft = data.draw(trees(vocabulary))
    target = table(seed, 0.3, vocabulary)
    assert error(spectr, target, fixed(draft), 4) < EXACT
    length = expected_length(spectr, target, fixed(draft))
    assert length == pytest.approx(expected_length(rejection, target, fixed(draft)), abs=EXACT)


# -- how much it accepts ---------------------------------------------------------------------------------


def _pair(seed: int) -> tuple[Tensor, Tensor]:
    return table(seed, vocabulary=3)(()), table(seed + 100, vocabulary=3)(())


def _best_transport(q: Tensor, p: Tensor, count: int) -> float:
    """The highest chance that the output is among ``count`` draws of p, by a linear program."""
    size = len(q)
    draws = list(itertools.product(range(size), repeat=count))
    gains = np.array([-float(token in drawn) for drawn in draws for token in range(size)])
    by_draws = np.kron(np.eye(len(draws)), np.ones(size))
    by_token = np.kron(np.ones(len(draws)), np.eye(size))
    weights = [math.prod(float(p[token]) for token in drawn) for drawn in draws]
    bounds = np.concatenate([weights, q.numpy()])
    found = linprog(gains, A_eq=np.concatenate([by_draws, by_token]), b_eq=bounds)
    assert found.success
    return float(-found.fun)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_it_accepts_as_its_formula_says_and_nearly_as_much_as_can_be(seed: int, count: int) -> None:
    q, p = _pair(seed)
    gamma = division_factor(q, p, count)
    share = float(torch.minimum(p, q / gamma).sum())
    accepted = 1 - (1 - share) ** count
    assert accepted == pytest.approx(gamma * share, abs=1e-4)  # the equation that gamma solves
    target, draft_model = always(*q.tolist()), always(*p.tolist())
    found = expected_length(spectr, target, sampled(draft_model, [-1] * count))
    assert found == pytest.approx(accepted, abs=EXACT)
    best = _best_transport(q, p, count)
    assert (1 - 1 / math.e) * best < found < best + 1e-9
    if count == 1:
        assert gamma == 1 and found == pytest.approx(best)


def test_more_candidates_are_accepted_more_often() -> None:
    lengths = [expected_length(spectr, table(3), sampled(table(103), [-1] * n)) for n in (1, 2, 3)]
    assert lengths[0] < lengths[1] < lengths[2] < 1


def test_distributions_that_have_nothing_in_common() -> None:
    target, drafts = always(0, 0.5, 0.5, 0), sampled(always(1, 0, 0, 0), [-1, -1])
    assert expected_length(spectr, target, drafts) == 0
    assert error(spectr, target, drafts, 2) < EXACT


# -- what is refused -------------------------------------------------------------------------------------


def test_siblings_drawn_without_replacement_are_refused() -> None:
    row = torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64)
    draft = Draft([0, 1], [-1, -1], {-1: row}, replacement=False)
    with pytest.raises(OutpaceError, match=r"drawn with replacement.*'rejection' or 'traversal'"):
        spectr(Logits(torch.empty(3, 0)), draft, Enumerated(Script([]), always(0, 0, 0.5, 0.5), draft))
    small = ToyTarget(surprise=0.5)
    with pytest.raises(OutpaceError, match=r"DraftModel draws them without.*replacement=true"):
        Engine(ToyTarget(), DraftModel(small, branching="2x2"), "spectr")
    Engine(ToyTarget(), DraftModel(small, branching="2x2", draws="independent", replacement=True), "spectr")
    for spec in ("lookahead", "token_recycling"):  # trees of chosen tokens
        Engine(ToyTarget(), load_drafter(spec), "spectr")
