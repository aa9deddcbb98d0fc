"""Shapes of a draft model's tree: static, or grown by the draft model's confidence."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, TypeVar

from torch import Tensor

from outpace.core import Draft, OutpaceError
from outpace.drafters.support.best_first import best_first
from outpace.drafters.support.sequoia import best_tree, likeliest
from outpace.tree import children, depths, select

T = TypeVar("T", int, float)

_MOST = 4096  # maximum number of nodes of a tree by branching
_RANKS = 16  # candidates of a place, at most, in a tree of marginals
_LEAST = 1e-300  # the chance stated for a confidence that rounds to 0


@dataclass
class Growing:
    """A tree that is being drafted, one layer at a time.

    Attributes:
        layers: maximum number of layers.
        shape: the shape by which it grows in this step.
        weights: per node, the log of the draft model's confidence in its whole path; 0 if not computed.
        ranks: per node, its rank among its siblings.
        distributions: parent -> the distribution of its children, if they were drawn.
        front: nodes that get children next; at first the root.
        fed: the row of each node fed to the draft model, counted from the tree's first.
        least: the log of the least confidence of a path that may pay for a row.
        ends: tokens after which nothing is drafted.
    """

    layers: int
    shape: TreeShape
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    distributions: dict[int, Tensor] = field(default_factory=dict)
    front: list[int] = field(default_factory=lambda: [-1])
    fed: dict[int, int] = field(default_factory=lambda: {-1: -1})
    depth: int = 0
    least: float = -math.inf
    ends: frozenset[int] = frozenset()

    def weight(self, node: int) -> float:
        return self.weights[node] if node >= 0 else 0.0

    def guessed(self, node: int) -> list[int]:
        """Tokens on the path to a node, its own included."""
        found: list[int] = []
        while node >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def finish(self, replacement: bool = False) -> Draft:
        """Convert the tree to a draft.

        Args:
            replacement: whether siblings were drawn with replacement, if there are any and they were drawn.
        """
        return self.shape.finish(self, replacement or not self.shape.branches)

    def add(self, parent: int, tokens: Seq[int], weights: Seq[float]) -> range:
        """Add children to a node and return their nodes. ``weights`` are the logs of their confidences."""
        first, before = len(self.tokens), self.weight(parent)
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.weights += [before + weight for weight in weights]
        self.ranks += range(len(tokens))
        return range(first, len(self.tokens))


class TreeShape(ABC):
    """Rules by which a tree grows.

    Attributes:
        depth: maximum number of layers.
        branches: whether it may branch.
        weighs: whether it depends on the draft model's confidence.
        key: equal for equal shapes: what kind it is, and the numbers that describe it.
    """

    depth: int
    branches: bool
    weighs: bool = False
    key: tuple[str, tuple[int, ...]]

    @abstractmethod
    def count(self, tree: Growing, node: int) -> int:
        """Number of children of a node of the front."""

    @abstractmethod
    def front(self, tree: Growing, layer: Seq[int]) -> list[int]:
        """The nodes of the newest layer that get children."""

    @abstractmethod
    def within(self, nodes: int | None) -> TreeShape:
        """This shape limited to the ``nodes`` nodes likeliest to be accepted; itself for None."""

    def finish(self, tree: Growing, replacement: bool) -> Draft:
        """Convert a tree of this shape to a draft. ``replacement`` as in ``Growing.finish``."""
        rows: Mapping[int, Tensor] | None = tree.distributions or None
        return Draft(tuple(tree.tokens), tuple(tree.parents), rows, replacement)


class Static(TreeShape):
    """A static tree: a node's child of rank r is the r-th child of its place in that tree.

    A chain is a static tree too.

    Args:
        parents: the tree.
        likeliest: its nodes, those accepted most often first, each after its parent and its higher-ranked
            siblings; by default in their own order.
    """

    def __init__(self, parents: Seq[int], likeliest: Seq[int] | None = None) -> None:
        self.parents = tuple(parents)
        self.key = ("static", self.parents)
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


class Confident(TreeShape):
    """EAGLE-2's dynamic tree (Li et al. 2024, arXiv 2406.16858, section 4).

    The ``width`` nodes of each layer with the most confident paths get ``width`` children each; in the end
    the ``nodes`` most confident nodes are kept, with their confidences as their chances. A path is never more
    confident than its prefix, so they are closed under parents.

    The choice of nodes depends on their tokens, so no distribution describes them: they are point masses.
    """

    branches = True
    weighs = True

    def __init__(self, width: int, nodes: int, depth: int) -> None:
        self.width = width
        self.nodes = nodes
        self.depth = depth
        self.key = ("confident", (width, nodes, depth))

    def count(self, tree: Growing, node: int) -> int:
        return self.width

    def front(self, tree: Growing, layer: Seq[int]) -> list[int]:
        best = sorted(tree.weights, reverse=True)
        # Only children of one of the most confident nodes so far may be kept.
        least = max(tree.least, best[self.nodes - 1] if len(best) >= self.nodes else -math.inf)
        going = [node for node in layer if tree.weights[node] > least]
        return sorted(sorted(going, key=lambda node: -tree.weights[node])[: self.width])

    def within(self, nodes: int | None) -> Confident:
        if nodes is None or not 0 < nodes < self.nodes:
            return self
        return Confident(min(self.width, nodes), nodes, min(self.depth, nodes))

    def finish(self, tree: Growing, replacement: bool) -> Draft:
        # The sort is stable: of equal paths the earlier node comes first, a parent before its child.
        ranked = sorted(range(len(tree.tokens)), key=lambda node: -tree.weights[node])
        chances = [max(math.exp(weight), _LEAST) for weight in tree.weights]
        return select(Draft(tuple(tree.tokens), tuple(tree.parents), chances=chances), ranked[: self.nodes])


class Marginals(TreeShape):
    """The best tree of places whose distributions do not depend on each other's tokens.

    It has the paths whose probabilities, the products of their tokens', are the highest (DDTree: Ringel,
    Romano 2026, arXiv 2604.12989, section 4). While it grows it is a chain, with all candidates of a place
    beside the chain's node; ``finish`` makes the tree of them.
    """

    branches = True
    weighs = True

    def __init__(self, nodes: int, depth: int) -> None:
        self.nodes = nodes
        self.depth = min(depth, nodes)
        self.key = ("marginals", (nodes, self.depth))

    def count(self, tree: Growing, node: int) -> int:
        return candidates_of(self.nodes, tree.depth)

    def front(self, tree: Growing, layer: Seq[int]) -> list[int]:
        return list(layer[:1])

    def within(self, nodes: int | None) -> Marginals:
        if nodes is None or not 0 < nodes < self.nodes:
            return self
        return Marginals(nodes, self.depth)

    def finish(self, tree: Growing, replacement: bool) -> Draft:
        places: dict[int, list[tuple[float, int]]] = {}  # parent, one for each place -> its candidates
        for token, parent, weight in zip(tree.tokens, tree.parents, tree.weights, strict=True):
            places.setdefault(parent, []).append((math.exp(weight - tree.weight(parent)), token))
        layers = list(places.values())

        def children_of(depth: int, chance: float) -> Iterator[tuple[float, int, int]]:
            for own, token in layers[depth] if depth < len(layers) else ():
                yield max(chance * own, _LEAST), token, depth + 1

        return best_first(0, children_of, self.nodes, tree.ends)


def candidates_of(nodes: int, depth: int) -> int:
    """Candidates of a place that may be in a tree of marginals: that of rank r is after depth + r nodes."""
    return min(nodes - depth, _RANKS)


def shape_of(
    depth: int,
    branching: str | Seq[int] = (),
    acceptance: str | Seq[float] = (),
    expand: int | None = None,
    max_nodes: int | None = None,
    method: str = "draft_model",
) -> TreeShape:
    """The shape that a draft model's options describe; by default a chain of ``depth`` tokens.

    Args:
        branching: children at each depth, as numbers or as "4x2".
        acceptance: acceptance rates by rank, as numbers or as "0.6/0.2".
        expand: number of nodes per layer that get children.
        max_nodes: nodes in total, with ``acceptance`` or ``expand``.
        method: name of the method, for messages.

    Raises:
        OutpaceError: values are invalid or exclude each other.
    """
    factors = numbers("branching", branching, "x", int, method)
    chances = numbers("acceptance", acceptance, "/", float, method)
    given = [name for name, value in _named(factors, chances, expand).items() if value]
    if len(given) > 1:
        raise OutpaceError(f"{method}: {' and '.join(given)} exclude each other; give one")
    if (max_nodes is not None) != (given in (["acceptance"], ["expand"])):
        raise OutpaceError(f"{method}: max_nodes goes with acceptance or expand; give both or neither")
    for name, value in (("num_speculative_tokens", depth), ("expand", expand), ("max_nodes", max_nodes)):
        if value is not None and value < 1:
            raise OutpaceError(f"{method}: {name} must be at least 1, not {value}")
    if len(factors) > depth:
        raise OutpaceError(
            f"{method}: branching has {len(factors)} depths but num_speculative_tokens is {depth}; raise that"
        )
    if any(factor < 1 for factor in factors):
        raise OutpaceError(f"{method}: branching must be numbers of at least 1, not {branching!r}")
    if (count := _size(factors, depth)) > _MOST:
        raise OutpaceError(
            f"{method}: branching {branching!r} makes a tree of {count} nodes, and the maximum is {_MOST}; "
            "lower its numbers or num_speculative_tokens"
        )
    if (
        any(not 0 <= chance <= 1 for chance in chances)
        or sum(chances) > 1 + 1e-9
        or (chances and not any(chances))
    ):
        raise OutpaceError(
            f"{method}: acceptance must be chances from 0 to 1 that add up to at most 1, as in 0.6/0.2, "
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
    """The numbers of an option, given as numbers or as text with separators.

    Raises:
        OutpaceError: they are not numbers; the message names the method and the option.
    """
    parts: Seq[Any] = given.split(separator) if isinstance(given, str) and given else given
    try:
        return tuple(kind(part) for part in parts)
    except (TypeError, ValueError) as error:
        raise OutpaceError(
            f"{method}: {name} must be numbers with {separator!r} between them: {error}"
        ) from error


def _size(factors: Seq[int], depth: int) -> int:
    """Number of nodes of the tree that ``branching_parents`` returns."""
    layers: list[int] = list(accumulate(factors, mul))
    return sum(layers) + (depth - len(layers)) * (layers[-1] if layers else 1)


def branching_parents(factors: Seq[int], depth: int) -> list[int]:
    """Parents of a tree whose nodes have a fixed number of children per depth, and one each at deeper depths.

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
