"""Shapes of a draft model's tree: fixed beforehand, or grown where the draft model is confident."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, TypeVar

from torch import Tensor

from outpace.core import Draft, OutpaceError
from outpace.drafters.support.sequoia import best_tree, likeliest
from outpace.tree import children, depths, select

T = TypeVar("T", int, float)

_MOST = 4096  # nodes of a tree by branching, whose number grows by leaps


@dataclass
class Growing:
    """A tree that is being drafted, a layer at a time.

    Attributes:
        layers: how many it may have.
        shape: how it grows in this step.
        weights: of each node, the log of the draft model's confidence in its whole path; 0 where nobody asks.
        ranks: of each node, its place among its siblings.
        distributions: parent -> what its children were drawn from, where they were drawn.
        front: nodes whose children come next; at first the root.
        fed: the row of each node that went through the draft model, counted from the tree's first.
    """

    layers: int
    shape: Shape
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    distributions: dict[int, Tensor] = field(default_factory=dict)
    front: list[int] = field(default_factory=lambda: [-1])
    fed: dict[int, int] = field(default_factory=lambda: {-1: -1})
    depth: int = 0

    def weight(self, node: int) -> float:
        return self.weights[node] if node >= 0 else 0.0

    def guessed(self, node: int) -> list[int]:
        """Tokens on the way to a node, its own included."""
        found: list[int] = []
        while node >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def finish(self, replacement: bool = False) -> Draft:
        """The draft that the tree makes.

        Args:
            replacement: its siblings, where it has any and they were drawn, were drawn with replacement.
        """
        return self.shape.finish(self, replacement or not self.shape.branches)

    def add(self, parent: int, tokens: Seq[int], weights: Seq[float]) -> range:
        """Put children under a node; which nodes they are. ``weights``: the log of the confidence in each."""
        first, before = len(self.tokens), self.weight(parent)
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.weights += [before + weight for weight in weights]
        self.ranks += range(len(tokens))
        return range(first, len(self.tokens))


class Shape(ABC):
    """The rules by which a tree grows.

    Attributes:
        depth: layers at most.
        branches: whether it may branch.
        weighs: whether it goes by the draft model's confidence.
    """

    depth: int
    branches: bool
    weighs: bool = False

    @abstractmethod
    def count(self, tree: Growing, node: int) -> int:
        """The number of children that a node of the front gets."""

    @abstractmethod
    def front(self, tree: Growing, layer: Seq[int]) -> list[int]:
        """The nodes of the newest layer that get children."""

    @abstractmethod
    def within(self, nodes: int | None) -> Shape:
        """This shape with at most ``nodes`` nodes, those likeliest to be accepted; itself for None."""

    def finish(self, tree: Growing, replacement: bool) -> Draft:
        """The draft that the tree makes. ``replacement``: how its siblings were drawn, where they were."""
        rows: Mapping[int, Tensor] | None = tree.distributions or None
        return Draft(tuple(tree.tokens), tuple(tree.parents), rows, replacement)


class Static(Shape):
    """A fixed tree: a node's child of rank r is the r-th child of its place in that tree.

    A chain is one, with a single child everywhere.

    Args:
        likeliest: the nodes, those accepted most often first, each after its parent and the siblings before
            it; by default their own order.
    """

    def __init__(self, parents: Seq[int], likeliest: Seq[int] | None = None) -> None:
        self.parents = tuple(parents)
        self._likeliest = range(len(parents)) if likeliest is None else likeliest
        self._narrower: dict[int, Static] = {}
        self.depth = max(depths(parents)) + 1
        self._below = children(parents)
        self.branches = any(len(below) > 1 for below in self._below)

    def _place(self, tree: Growing, node: int) -> int:
        ranks: list[int] = []
        while node >= 0:
            ranks.append(tree.ranks[node])
            node = tree.parents[node]
        place = -1
        for rank in reversed(ranks):
            place = self._below[place][rank]
        return place

    def count(self, tree: Growing, node: int) -> int:
        return len(self._below[self._place(tree, node)])

    def front(self, tree: Growing, layer: Seq[int]) -> list[int]:
        return [node for node in layer if self.count(tree, node)]

    def within(self, nodes: int | None) -> Static:
        if nodes is None or not 0 < nodes < len(self.parents):
            return self
        if nodes not in self._narrower:
            kept = sorted(self._likeliest[:nodes])
            places = {-1: -1} | {node: place for place, node in enumerate(kept)}
            self._narrower[nodes] = Static([places[self.parents[node]] for node in kept])
        return self._narrower[nodes]


class Confident(Shape):
    """EAGLE-2's dynamic tree (Li et al. 2024, arXiv 2406.16858, section 4).

    Each layer goes on from its ``width`` nodes with the most confident paths, with ``width`` children each;
    of all nodes the ``nodes`` most confident are kept. A path is never more confident than its beginning, so
    they are closed under parents.

    Which nodes stay depends on their tokens, so no distribution describes what is left: point masses.
    """

    branches = True
    weighs = True

    def __init__(self, width: int, nodes: int, depth: int) -> None:
        self.width = width
        self.nodes = nodes
        self.depth = depth

    def count(self, tree: Growing, node: int) -> int:
        return self.width

    def front(self, tree: Growing, layer: Seq[int]) -> list[int]:
        return sorted(sorted(layer, key=lambda node: -tree.weights[node])[: self.width])

    def within(self, nodes: int | None) -> Confident:
        if nodes is None or not 0 < nodes < self.nodes:
            return self
        return Confident(min(self.width, nodes), nodes, min(self.depth, nodes))

    def finish(self, tree: Growing, replacement: bool) -> Draft:
        # The sort is stable: of equal paths the earlier node comes first, a parent before its child.
        ranked = sorted(range(len(tree.tokens)), key=lambda node: -tree.weights[node])
        return select(Draft(tuple(tree.tokens), tuple(tree.parents)), ranked[: self.nodes])


def shape_of(
    depth: int,
    branching: str | Seq[int] = (),
    acceptance: str | Seq[float] = (),
    expand: int | None = None,
    max_nodes: int | None = None,
    method: str = "draft_model",
) -> Shape:
    """The shape that a draft model's options describe: a chain of ``depth`` tokens where none is given.

    Args:
        branching: children at each depth, as numbers or as "4x2".
        acceptance: chances of acceptance by rank, as numbers or as "0.6/0.2".
        expand: nodes that each layer goes on from.
        max_nodes: nodes in all, with ``acceptance`` or ``expand``.
        method: whose options they are, for messages.

    Raises:
        OutpaceError: values that mean nothing, or exclude each other.
    """
    factors = numbers("branching", branching, "x", int, method)
    chances = numbers("acceptance", acceptance, "/", float, method)
    given = [name for name, value in _named(factors, chances, expand).items() if value]
    if len(given) > 1:
        raise OutpaceError(f"{method}: {' and '.join(given)} are different trees; choose one")
    if (max_nodes is not None) != (given in (["acceptance"], ["expand"])):
        raise OutpaceError(f"{method}: max_nodes bounds a tree of acceptance or expand; give both or neither")
    for name, value in (("num_speculative_tokens", depth), ("expand", expand), ("max_nodes", max_nodes)):
        if value is not None and value < 1:
            raise OutpaceError(f"{method}: {name} must be at least 1, not {value}")
    if len(factors) > depth:
        raise OutpaceError(
            f"{method}: branching has {len(factors)} depths and num_speculative_tokens is {depth}; raise that"
        )
    if any(factor < 1 for factor in factors):
        raise OutpaceError(f"{method}: branching must be of numbers of at least 1, not {branching!r}")
    if (count := _size(factors, depth)) > _MOST:
        raise OutpaceError(
            f"{method}: branching {branching!r} makes a tree of {count} nodes, and {_MOST} is the most; "
            "lower its numbers or num_speculative_tokens"
        )
    if (
        any(not 0 <= chance <= 1 for chance in chances)
        or sum(chances) > 1 + 1e-9
        or (chances and not any(chances))
    ):
        raise OutpaceError(
            f"{method}: acceptance must be chances from 0 to 1 that add up to 1 at most, as in 0.6/0.2, "
            f"not {acceptance!r}"
        )
    if expand is not None and max_nodes is not None:
        return Confident(expand, max_nodes, depth)
    if chances and max_nodes is not None:
        parents = best_tree(chances, max_nodes, depth)
        return Static(parents, likeliest(parents, chances))
    return Static(branching_parents(factors, depth))


def _named(factors: Seq[int], chances: Seq[float], expand: int | None) -> dict[str, bool]:
    return {"branching": bool(factors), "acceptance": bool(chances), "expand": expand is not None}


def numbers(
    name: str, given: str | Seq[T], separator: str, kind: type[T], method: str = "draft_model"
) -> tuple[T, ...]:
    """The numbers of an option, given as such or as text with a separator between them.

    Raises:
        OutpaceError: they are not numbers; the message names the method and the option.
    """
    parts: Seq[Any] = given.split(separator) if isinstance(given, str) and given else given
    try:
        return tuple(kind(part) for part in parts)
    except (TypeError, ValueError) as error:
        raise OutpaceError(
            f"{method}: {name} must be numbers, {separator!r} between them: {error}"
        ) from error


def _size(factors: Seq[int], depth: int) -> int:
    """Nodes of the tree that ``branching_parents`` makes."""
    layers: list[int] = list(accumulate(factors, mul))
    return sum(layers) + (depth - len(layers)) * (layers[-1] if layers else 1)


def branching_parents(factors: Seq[int], depth: int) -> list[int]:
    """Parents of a tree whose nodes at each depth have the same number of children, and one per node deeper
    down.

    Args:
        factors: children of the root, of each of its children, and so on.
    """
    parents: list[int] = []
    layer = [-1]
    for place in range(depth):
        below: list[int] = []
        for node in layer:
            for _ in range(factors[place] if place < len(factors) else 1):
                below.append(len(parents))
                parents.append(node)
        layer = below
    return parents
