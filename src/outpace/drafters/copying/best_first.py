"""A tree grown by its likeliest nodes, and the chance that a match of some length is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from outpace.core import Draft

T = TypeVar("T")


def best_first(
    root: T, children: Callable[[T, float], Iterable[tuple[float, int, T]]], max_nodes: int
) -> Draft:
    """The tree of the nodes with the greatest chances, picked one by one; of equals, the one offered first.

    Args:
        root: what the root's children come from.
        children: what a node's children come from, and the node's chance -> of each child its chance, at most
            the node's, its token, and what its own children come from.
        max_nodes: nodes of the tree at most.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    waiting: list[tuple[float, int, int, int, T]] = []
    order = count()
    node, source, chance = -1, root, 1.0
    while True:
        for estimate, token, below in children(source, chance):
            heappush(waiting, (-estimate, next(order), node, token, below))
        if not waiting or len(tokens) >= max_nodes:
            return Draft(tokens, parents, chances=chances)
        negative, _, parent, token, source = heappop(waiting)
        node, chance = len(tokens), -negative
        tokens.append(token)
        parents.append(parent)
        chances.append(chance)


def trust(length: int) -> float:
    """The share of matches of ``length`` tokens whose next token follows again: fitted on GSM8K and
    HumanEval.

    Measured with prompt lookup's latest matches: 0.35 to 0.37 for a match of 1, 0.54 for 2, 0.67 to 0.73 for
    3, 0.83 to 0.89 for 7.
    """
    return length / (length + 2)
