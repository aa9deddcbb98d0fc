"""Shapes of trees: the meaning of options, and the nodes kept of a tree that has grown."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from itertools import product
from typing import Any

import pytest

from outpace.core import OutpaceError
from outpace.drafters.support.shapes import (
    Confident,
    Growing,
    Marginals,
    Static,
    branching_parents,
    shape_of,
)
from outpace.tree import path_to


def test_branching_factors_by_depth() -> None:
    assert branching_parents((), 3) == [-1, 0, 1]
    assert branching_parents((2,), 2) == [-1, -1, 0, 1]
    assert branching_parents((2, 3), 2) == [-1, -1, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "parents"),
    [
        ({}, [-1, 0, 1]),
        ({"branching": "2x1"}, [-1, -1, 0, 1, 2, 3]),
        ({"branching": (1, 2)}, [-1, 0, 0, 1, 2]),
        ({"acceptance": "0.5/0.4", "max_nodes": 3}, [-1, -1, 0]),
        ({"acceptance": (0.9,), "max_nodes": 9}, [-1, 0, 1]),
    ],
)
def test_options_describe_a_static_tree(options: Any, parents: list[int]) -> None:
    shape = shape_of(3, **options)
    assert isinstance(shape, Static) and list(shape.parents) == parents
    assert shape.branches == (parents != [-1, 0, 1]) and shape.depth <= 3


@pytest.mark.parametrize(("factors", "nodes"), [("3", 3 + 3 + 3), ("4x2", 4 + 8 + 8), ("15x15x15", 3615)])
def test_trees_of_thousands_of_nodes_are_allowed(factors: str, nodes: int) -> None:
    shape = shape_of(3, factors)
    assert isinstance(shape, Static) and len(shape.parents) == nodes


def test_a_chain_is_as_long_as_one_likes() -> None:
    """Longer than calls may nest."""
    shape = shape_of(3000)
    tree = Growing(3000, shape)
    while tree.front:
        (node,) = tree.front
        assert shape.count(tree, node) == 1
        tree.front = shape.front(tree, tree.add(node, [1], [0.0])) if len(tree.tokens) < 2000 else []
    assert len(tree.tokens) == 2000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branching": "2", "expand": 2}, "branching and expand exclude each other"),
        ({"expand": 2}, "max_nodes goes with acceptance"),
        ({"max_nodes": 2}, "max_nodes goes with acceptance"),
        ({"branching": "2", "max_nodes": 2}, "max_nodes goes with acceptance"),
        ({"branching": "2x2x2x2"}, "has 4 depths but num_speculative_tokens is 3"),
        ({"branching": "2xtwo"}, "branching must be numbers with 'x' between them"),
        ({"branching": "2x0"}, "numbers of at least 1"),
        ({"branching": "2x"}, "branching must be numbers with 'x' between them"),
        ({"branching": "99x99x99"}, "makes a tree of 980199 nodes, and the maximum is 4096"),
        ({"acceptance": "0.5//0.2", "max_nodes": 4}, "acceptance must be numbers with '/' between them"),
        ({"acceptance": "0.7/0.6", "max_nodes": 4}, "add up to at most 1"),
        ({"acceptance": "0/0", "max_nodes": 4}, "chances from 0 to 1"),
        ({"expand": 0, "max_nodes": 4}, "expand must be at least 1"),
        ({"expand": 1, "max_nodes": 0}, "max_nodes must be at least 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: Any, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        shape_of(3, **options)


class Unpruned(Confident):
    """The shape that grows on from the best nodes of a layer even if nothing below them can be kept."""

    def front(self, tree: Growing, layer: Seq[int]) -> list[int]:
        return sorted(sorted(layer, key=lambda node: -tree.weights[node])[: self.width])


def grown(shape: Confident, seed: int) -> Growing:
    """A tree with random confidences, some of them certain: a child is then as likely as its parent."""
    tree = Growing(4, shape)
    while tree.front and tree.depth < 4:
        layer: list[int] = []
        for node in tree.front:
            draw = random.Random(f"{seed} {tree.guessed(node)}")
            layer += tree.add(node, [1, 2, 3], [draw.choice([0.0, -0.5, -1.0, -2.0]) for _ in range(3)])
        tree.depth += 1
        tree.front = shape.front(tree, layer)
    return tree


@pytest.mark.parametrize("seed", range(5))
def test_the_most_confident_nodes_are_kept_and_no_child_without_its_parent(seed: int) -> None:
    tree = grown(Confident(width=3, nodes=7, depth=4), seed)
    draft = tree.finish()  # Draft itself refuses a node before its parent
    assert len(draft) == 7 and draft.distributions is None and draft.chances is not None
    expected = sorted(map(math.exp, tree.weights), reverse=True)[:7]
    assert list(draft.chances) == expected
    for node, parent in enumerate(draft.parents):
        guessed = [draft.tokens[place] for place in path_to(draft.parents, node)]
        (found,) = (place for place in range(len(tree.tokens)) if tree.guessed(place) == guessed)
        assert draft.chances[node] == math.exp(tree.weights[found])
        assert parent < 0 or draft.chances[node] <= draft.chances[parent]


def test_only_nodes_whose_children_may_be_kept_get_any() -> None:
    fewer = 0
    for seed in range(20):
        pruned, whole = (grown(kind(width=3, nodes=7, depth=4), seed) for kind in (Confident, Unpruned))
        one, other = pruned.finish(), whole.finish()
        assert (one.tokens, one.parents, one.chances) == (other.tokens, other.parents, other.chances)
        fewer += len(pruned.tokens) < len(whole.tokens)
    assert fewer > 10
    hopeless = Growing(4, Confident(width=2, nodes=2, depth=4))
    hopeless.add(-1, [1, 2], [-900.0, -1000.0])
    assert min(hopeless.finish().chances or ()) > 0


def test_a_static_tree_within_fewer_nodes_has_the_likeliest() -> None:
    parents = [-1, -1, 0, 0, 2]
    shape = Static(parents, likeliest=[0, 2, 4, 1, 3])
    assert [list(shape.within(nodes).parents) for nodes in (1, 2, 3, 4)] == [
        [-1],
        [-1, 0],
        [-1, 0, 1],
        [-1, -1, 0, 2],  # the second candidate of the root is the node after the first again
    ]
    assert [shape.within(nodes) for nodes in (None, 5, 9)] == [shape] * 3
    assert shape.within(3) is shape.within(3) and shape.within(3).depth == 3
    assert list(Static(parents).within(3).parents) == parents[:3]


def test_a_dynamic_tree_within_fewer_nodes_grows_no_wider_and_no_deeper() -> None:
    shape = Confident(width=3, nodes=7, depth=4)
    narrow = shape.within(2)
    assert (narrow.width, narrow.nodes, narrow.depth) == (2, 2, 2)
    assert shape.within(None) is shape and shape.within(7) is shape


def grown_by(shape: Marginals, layers: int, chances: Seq[Seq[float]], ends: frozenset[int]) -> Growing:
    """The tree of places with these chances of tokens 0, 1, ..."""
    tree = Growing(layers, shape, ends=ends)
    while tree.front:
        (node,) = tree.front
        own = sorted(enumerate(chances[tree.depth]), key=lambda pair: -pair[1])[: shape.count(tree, node)]
        made = tree.add(node, [token for token, _ in own], [math.log(chance) for _, chance in own])
        tree.depth += 1
        going = [child for child in made if tree.tokens[child] not in ends]
        tree.front = shape.front(tree, going) if tree.depth < tree.layers else []
    return tree


@pytest.mark.parametrize("seed", range(8))
def test_marginals_make_the_tree_of_the_most_probable_paths(seed: int) -> None:
    """By enumeration of all paths; none goes on after a token that ends the text."""
    source = random.Random(seed)
    places, vocabulary, nodes = 4, 5, source.choice([1, 3, 8, 20])
    ends = frozenset([source.randrange(vocabulary)] if seed % 2 else [])
    chances = [[source.random() ** 3 + 1e-3 for _ in range(vocabulary)] for _ in range(places)]
    chances = [[one / sum(row) for one in row] for row in chances]
    shape = Marginals(nodes, places)
    draft = shape.finish(grown_by(shape, shape.depth, chances, ends), False)
    every = {
        path: math.prod(chances[place][token] for place, token in enumerate(path))
        for length in range(1, places + 1)
        for path in product(range(vocabulary), repeat=length)
        if not ends.intersection(path[:-1])
    }
    best = sorted(every.values(), reverse=True)[:nodes]
    assert (
        draft.chances == pytest.approx(best)
        and len({*zip(draft.tokens, draft.parents, strict=True)}) == nodes
    )
    for node, chance in enumerate(draft.chances or ()):
        path = tuple(draft.tokens[one] for one in path_to(draft.parents, node))
        assert chance == pytest.approx(every[path])


def test_a_tree_of_marginals_within_fewer_nodes_is_the_best_one_of_these() -> None:
    shape = Marginals(9, 4)
    assert shape.within(None) is shape.within(0) is shape.within(9) is shape
    assert shape.within(2).key == Marginals(2, 4).key and shape.within(2).depth == 2


def test_a_tree_of_certain_places_is_a_chain() -> None:
    chances = [[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]]
    tree = grown_by(Marginals(3, 3), 3, chances, frozenset())
    draft = tree.shape.finish(tree, False)
    assert (list(draft.tokens), list(draft.parents)) == ([0, 1, 0], [-1, 0, 1])
