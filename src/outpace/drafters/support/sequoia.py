"""Optimal static trees for measured acceptance rates (Sequoia, Chen et al. 2024, arXiv 2402.12374).

The candidates of a node are ranked. The acceptance rate of a candidate is assumed to depend only on its rank,
and measured. A node's probability is then the product along its path, and a tree's worth, the expected number
of accepted tokens, is the sum over its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache

from outpace.core import Stats
from outpace.sequence import Step
from outpace.tree import children


def best_tree(acceptance: Seq[float], nodes: int, depth: int) -> list[int]:
    """The parents of a tree of the greatest worth; siblings are in the order of their ranks.

    Dynamic programming: the best way to spend n nodes on the candidates of rank r and later, with d depths
    left, spends some on the subtree of rank r and the rest on the later ones. O(n^2 d r).

    Args:
        acceptance: the probability, per rank, that the candidate of this rank is the accepted one; they add
            up to at most 1.
        nodes: maximum number of nodes in the tree.
        depth: maximum number of nodes on a path.
    """

    @cache
    def worth(budget: int, rank: int, left: int) -> tuple[float, int]:
        """The worth of the best trees of candidates ``rank`` and later, and the nodes of the first."""
        if not budget or not left or rank == len(acceptance):
            return 0.0, 0
        # A candidate is used only together with all higher-ranked ones.
        best = (0.0, 0)
        for size in range(1, budget + 1):
            inside = acceptance[rank] * (1 + worth(size - 1, 0, left - 1)[0])
            value = inside + worth(budget - size, rank + 1, left)[0]
            if value > best[0]:
                best = (value, size)
        return best

    parents: list[int] = []
    # Breadth first, so that a tree cut to its first nodes keeps the shallow ones.
    waiting = [(-1, nodes, depth)]
    for parent, budget, left in waiting:
        rank = 0
        while (size := worth(budget, rank, left)[1]) > 0:
            parents.append(parent)
            waiting.append((len(parents) - 1, size - 1, left - 1))
            budget, rank = budget - size, rank + 1
    return parents


def likeliest(parents: Seq[int], acceptance: Seq[float]) -> list[int]:
    """The nodes of a tree, the most probable first.

    A node comes after its parent and its higher-ranked siblings, so that the first n nodes are a tree.
    """
    chances: dict[int, float] = {-1: 1.0}
    keys: dict[int, float] = {-1: 1.0}
    elder: dict[int, int] = {}  # parent -> its latest child
    ranks = dict.fromkeys(range(-1, len(parents)), 0)
    for node, parent in enumerate(parents):
        chances[node] = chances[parent] * acceptance[ranks[parent]]
        keys[node] = min(chances[node], keys[elder.get(parent, parent)])
        elder[parent], ranks[parent] = node, ranks[parent] + 1
    return sorted(range(len(parents)), key=lambda node: -keys[node])


def count_ranks(step: Step) -> None:
    """Count, at each node that the verifier visited, the ranks of its candidates and the rank accepted."""
    below = children(step.draft.parents)
    visited = [-1, *step.path]
    if len(step.tokens) == len(step.path):  # the text ended on the last one, so its children were not visited
        visited.pop()
    stats = step.sequence.stats
    for place, node in enumerate(visited):
        accepted = step.path[place] if place < len(step.path) else None
        for rank, child in enumerate(below[node]):
            stats.count(f"rank_{rank}_offered", 1)
            stats.count(f"rank_{rank}_accepted", int(child == accepted))


def acceptance_by_rank(stats: Seq[Stats]) -> tuple[float, ...]:
    """The measured acceptance of each rank of candidates, from the counts of ``count_ranks``."""
    found: list[float] = []
    while offered := sum(own.extra.get(f"rank_{len(found)}_offered", 0) for own in stats):
        accepted = sum(own.extra.get(f"rank_{len(found)}_accepted", 0) for own in stats)
        found.append(accepted / offered)
    return tuple(found)
