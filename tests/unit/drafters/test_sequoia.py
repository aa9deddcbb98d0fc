"""The best static tree: against all trees, and from what drafting counted."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from outpace.core import Draft, SamplingParams, Stats
from outpace.drafters.support.sequoia import acceptance_by_rank, best_tree, count_ranks, likeliest
from outpace.drafters.support.shapes import branching_parents, shape_of
from outpace.draws.logits import Logits
from outpace.draws.noise import Key
from outpace.sequence import Sequence, Step
from outpace.tree import children, depths


def worth(acceptance: tuple[float, ...], parents: list[int]) -> float:
    """Expected number of accepted tokens: the sum of all nodes' chances."""
    chances: list[float] = []
    rank = [children(parents)[parent].index(node) for node, parent in enumerate(parents)]
    for node, parent in enumerate(parents):
        before = chances[parent] if parent >= 0 else 1.0
        chances.append(before * (acceptance[rank[node]] if rank[node] < len(acceptance) else 0.0))
    return sum(chances)


@cache
def all_trees(nodes: int) -> tuple[tuple[int, ...], ...]:
    if nodes == 0:
        return ((),)
    return tuple((*tree, parent) for tree in all_trees(nodes - 1) for parent in range(-1, nodes - 1))


@pytest.mark.parametrize(
    "acceptance", [(0.6, 0.2, 0.1), (0.3, 0.3, 0.3), (0.1, 0.5), (0.9,), (0.0, 0.4, 0.5)]
)
@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (4, 2), (6, 3), (6, 6), (5, 1)])
def test_no_tree_is_better(acceptance: tuple[float, ...], nodes: int, depth: int) -> None:
    found = best_tree(acceptance, nodes, depth)
    assert len(found) <= nodes and max(depths(found), default=0) < depth
    others = [tree for size in range(nodes + 1) for tree in all_trees(size)]
    best = max(worth(acceptance, list(tree)) for tree in others if max(depths(tree), default=0) < depth)
    assert worth(acceptance, found) == pytest.approx(best, abs=1e-12)


def test_a_sure_first_candidate_makes_a_chain_and_doubt_makes_it_wide() -> None:
    assert best_tree((0.9, 0.05), 4, 9) == branching_parents((), 4)
    assert best_tree((0.3, 0.29, 0.28), 3, 9) == [-1, -1, -1]


@pytest.mark.parametrize("acceptance", [(0.6, 0.2, 0.1), (0.45, 0.25, 0.2), (0.9, 0.05)])
def test_the_likeliest_nodes_of_the_best_tree_are_the_best_smaller_tree(
    acceptance: tuple[float, ...],
) -> None:
    whole = shape_of(5, acceptance=acceptance, max_nodes=20)
    for nodes in range(1, 20):
        narrow = list(whole.within(nodes).parents)
        best = worth(acceptance, best_tree(acceptance, nodes, 5))
        assert len(narrow) == nodes and worth(acceptance, narrow) == pytest.approx(best, abs=1e-12), nodes


def test_a_node_comes_after_its_parent_and_its_elder_siblings_whatever_the_chances() -> None:
    parents = [-1, -1, 0, 1, 1]
    order = likeliest(parents, (0.1, 0.8))
    assert sorted(order) == list(range(5))
    for node, parent in enumerate(parents):
        elders = [other for other in range(node) if parents[other] == parent]
        assert all(order.index(other) < order.index(node) for other in [parent, *elders] if other >= 0)


def test_ranks_are_counted_at_the_nodes_the_verifier_came_to() -> None:
    text = Sequence([1], SamplingParams(), Key(0), limit=9)
    draft = Draft((5, 6, 7, 8, 9), (-1, -1, 1, 1, 0))

    def step(path: list[int], tokens: list[int]) -> Step:
        logits = Logits(torch.empty(6, 0))  # of no vocabulary: nobody reads them
        return Step(draft, range(5), path, tokens, logits, 0, text, {})

    count_ranks(step([1, 2], [6, 7, 3]))  # the root's second, its first, and no child of that
    count_ranks(step([], [4]))  # none of the root's
    count_ranks(step([0], [5]))  # the root's first, which ended the text: nobody looked further
    assert acceptance_by_rank([text.stats]) == (2 / 4, 1 / 4)
    assert acceptance_by_rank([Stats()]) == ()
