"""Shapes of trees: the meaning of options, and the nodes kept of a tree that has grown."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outpace.core import OutpaceError
from outpace.drafters.support.shapes import Confident, Growing, Static, branching_parents, shape_of


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


@pytest.mark.parametrize("seed", range(5))
def test_the_most_confident_nodes_are_kept_and_no_child_without_its_parent(seed: int) -> None:
    draw = random.Random(seed)
    shape = Confident(width=3, nodes=7, depth=4)
    tree = Growing(4, shape)
    while tree.depth < 4:
        layer: list[int] = []
        for node in tree.front:
            # Some are certain: a child is then as likely as its parent.
            layer += tree.add(node, [1, 2, 3], [draw.choice([0.0, -0.5, -1.0, -2.0]) for _ in range(3)])
        tree.depth += 1
        tree.front = shape.front(tree, layer)
        assert len(tree.front) <= 3
        assert min(tree.weights[n] for n in tree.front) >= max(
            (tree.weights[n] for n in layer if n not in tree.front), default=-99
        )
    draft = shape.finish(tree, replacement=False)  # Draft itself refuses a node before its parent
    assert len(draft) == 7 and draft.distributions is None
    weights = sorted(tree.weights, reverse=True)
    kept = []
    for node, parent in enumerate(draft.parents):
        # Find the node again by its path: tokens are unique among siblings.
        above = kept[parent] if parent >= 0 else -1
        kept.append(
            next(n for n, p in enumerate(tree.parents) if p == above and tree.tokens[n] == draft.tokens[node])
        )
    assert sorted((tree.weights[n] for n in kept), reverse=True) == weights[:7]


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
