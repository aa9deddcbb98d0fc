"""A tree of guesses grown best first: the node most likely to be accepted is drafted next."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from heapq import heappop, heappush
from typing import TypeVar

from outpace.core import Draft

Context = TypeVar("Context")


def best_first(
    root: Context,
    expand: Callable[[Context, float], Iterable[tuple[float, int, Context]]],
    most: int,
    stops: Container[int],
) -> Draft:
    """The draft of the ``most`` likeliest guesses, with their chances, the likeliest first.

    Args:
        root: what is known at the root.
        expand: the children of a node, by what is known at it and its chance of acceptance: of each its own
            chance, at most that, its token, and what is known at it.
        most: nodes at most.
        stops: tokens without children.
    """
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    # A guess that may become a node: (-chance, parent, which child of it), then its token and context.
    guesses: list[tuple[float, int, int, int, Context]] = []

    def push(context: Context, parent: int, chance: float) -> None:
        for place, (own, token, known) in enumerate(expand(context, chance)):
            heappush(guesses, (-own, parent, place, token, known))

    push(root, -1, 1.0)
    while guesses and len(tokens) < most:
        negative, parent, _, token, context = heappop(guesses)
        tokens.append(token)
        parents.append(parent)
        chances.append(-negative)
        if token not in stops:
            push(context, len(tokens) - 1, -negative)
    return Draft(tokens, parents, chances=chances)


def trust(length: int) -> float:
    """The share of latest matches of this length whose next token follows again: fitted on GSM8K, HumanEval.

    Measured for prompt lookup: 0.35 to 0.37 for a match of 1, 0.54 for 2, 0.67 to 0.73 for 3, 0.83 to 0.89
    for 7.
    """
    return length / (length + 2)
