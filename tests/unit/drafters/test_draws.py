"""Candidates of a node: drawn from their distribution, without or with replacement."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from outpace.core import SamplingParams
from outpace.drafters.support.draws import Draws
from outpace.drafters.support.vocabulary import Intersection, Subset, Vocabulary
from outpace.draws.noise import Key
from outpace.sequence import Sequence

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
PAIRS = list(itertools.product(range(len(P)), repeat=2))
DRAWS = 500


def pairs(draws: Draws, coupled: bool = False, first: int = 0) -> list[tuple[int, int]]:
    """The two candidates of one node, with so many seeds."""
    found = []
    for seed in range(DRAWS):
        params = SamplingParams(temperature=1.0, seed=seed)
        sequence = Sequence([1], params, Key(seed, coupled), limit=9, eos_token_ids=frozenset())
        children = draws.sampled(sequence, P.log().float(), depth=0, first=first, count=2)
        assert isinstance(children.distribution, Tensor)
        assert (children.distribution - P).abs().max() < 1e-6
        found.append((children.tokens[0], children.tokens[1]))
    return found


def fits(found: list[tuple[int, int]], chances: dict[tuple[int, int], float]) -> bool:
    """True if pairs follow these chances, by chi-square; the seeds are fixed, so the answer is too."""
    possible = [pair for pair in PAIRS if chances[pair] > 0]
    assert set(found) <= set(possible)
    counts = [found.count(pair) for pair in possible]
    return bool(chisquare(counts, [chances[pair] * DRAWS for pair in possible]).pvalue > 1e-3)


def test_with_replacement_siblings_are_drawn_each_by_itself() -> None:
    found = pairs(Draws("independent", replacement=True))
    assert fits(found, {(a, b): float(P[a] * P[b]) for a, b in PAIRS})


@pytest.mark.parametrize(
    ("noise", "coupled"), [("independent", False), ("coupled", False), ("coupled", True)]
)
def test_without_replacement_the_second_is_drawn_from_what_is_left(noise: str, coupled: bool) -> None:
    found = pairs(Draws(noise), coupled)  # type: ignore[arg-type]
    chances = {(a, b): float(P[a] * P[b] / (1 - P[a])) * (a != b) for a, b in PAIRS}
    assert fits(found, chances)


@pytest.mark.parametrize("replacement", [True, False])
def test_nodes_draw_apart_from_each_other(replacement: bool) -> None:
    draws = Draws("independent", replacement)
    here, there = pairs(draws), pairs(draws, first=2)
    found = [(a, b) for (a, _), (b, _) in zip(here, there, strict=True)]
    assert fits(found, {(a, b): float(P[a] * P[b]) for a, b in PAIRS})


def shared() -> Vocabulary:
    """An intersection of a draft model's tokens 4, 0, 2 with the target's 1, 5, 6."""
    found = object.__new__(Intersection)
    found._pairs, found._size = torch.tensor([[1, 5, 6], [4, 0, 2]]), 9
    return found


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("counts", [[1, 1], [2, 3]])
@pytest.mark.parametrize(
    ("vocabulary", "width"),
    [(Vocabulary(), 9), (Subset(torch.tensor([0, 3, 4, 8]), 9), 4), (shared(), 5)],
)
def test_the_best_of_the_drafted_ids_are_those_of_all(
    vocabulary: Vocabulary, width: int, counts: list[int], weigh: bool
) -> None:
    rows = torch.randn(2, width, generator=torch.Generator().manual_seed(3))
    draws = Draws(weigh=weigh)
    few, ids = vocabulary.drafted(rows)
    for found, expected in zip(
        draws.best(few, counts, ids), draws.best(vocabulary.logits(rows), counts), strict=True
    ):
        assert found.tokens == expected.tokens
        assert found.weights == pytest.approx(expected.weights)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "draws",
    [Draws("coupled"), Draws("independent", replacement=True), Draws("coupled", weigh=True)],
    ids=["without", "with", "weighed"],
)
def test_draws_among_the_drafted_ids_are_those_among_all(draws: Draws, count: int, coupled: bool) -> None:
    ids = torch.tensor([7, 2, 30, 11, 21])
    part = Subset(ids, 40)
    row = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    for seed in range(30):
        params = SamplingParams(temperature=0.9, top_p=0.9, seed=seed)
        sequence = Sequence([1], params, Key(seed, coupled), limit=9, eos_token_ids=frozenset())
        own = draws.sampled(sequence, row[0], depth=1, first=2, count=count, ids=ids)
        among = draws.sampled(sequence, part.logits(row)[0], depth=1, first=2, count=count)
        assert own.tokens == among.tokens and set(own.tokens) <= set(ids.tolist())
        assert own.weights == pytest.approx(among.weights) and own.peak == pytest.approx(among.peak)
        assert own.distribution is not None and among.distribution is not None
        assert torch.allclose(part.whole(own.distribution), among.distribution)


@pytest.mark.parametrize(
    "cut", [{}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 20, "top_p": 0.6}, {"min_p": 0.2}], ids=str
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_draws_from_the_best_tokens_are_those_from_all(cut: dict[str, float], temperature: float) -> None:
    # Peaked rows, of which the best tokens have nearly all of the weight, and sometimes all that is kept.
    rows = 4 * torch.randn(40, 200, generator=torch.Generator().manual_seed(1))
    few, all_of_them = Draws(weigh=True, listed=64), Draws(weigh=True)
    same = 0
    for seed, row in enumerate(rows):
        params = SamplingParams(temperature=temperature, seed=seed, **cut)  # type: ignore[arg-type]
        sequence = Sequence([1], params, Key(seed), limit=9, eos_token_ids=frozenset())
        [found] = few.among_best(row[None], [sequence], [2], [2])
        expected = all_of_them.sampled(sequence, row, depth=2, first=5, count=2)
        alike = found.tokens == expected.tokens
        same += alike
        if alike:
            assert found.weights == pytest.approx(expected.weights, abs=0.1)
    assert same >= 36


def test_a_row_without_a_likely_token_gives_no_candidates() -> None:
    sequence = Sequence([1], SamplingParams(temperature=1.0), Key(0), limit=9, eos_token_ids=frozenset())
    rows = torch.full((3, 100), -torch.inf)
    rows[1, 7], rows[2] = 1.0, torch.nan
    none, one, wrong = Draws(weigh=True, listed=64).among_best(rows, [sequence] * 3, [0] * 3, [2] * 3)
    assert not none.tokens and one.tokens == [7] and one.weights == [0.0] and not wrong.tokens
