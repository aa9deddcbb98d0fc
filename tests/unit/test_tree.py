"""Trees as lists of parents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.core import Draft
from outpace.tree import (
    Trie,
    ancestor_mask,
    chain,
    children,
    depths,
    few_leaves,
    is_chain,
    path_to,
    select,
    trim,
    worthwhile,
)


@st.composite
def trees(draw: st.DrawFn, most: int = 24, tokens: int = 4) -> Draft:
    size = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return Draft([draw(st.integers(0, tokens - 1)) for _ in range(size)], parents)


@given(trees())
def test_ancestor_mask_is_the_paths(draft: Draft) -> None:
    mask = ancestor_mask(draft.parents)
    assert mask.shape == (len(draft), len(draft))
    for node in range(len(draft)):
        assert sorted(np.flatnonzero(mask[node])) == path_to(draft.parents, node)


@given(trees())
def test_depth_is_the_length_of_the_path_above(draft: Draft) -> None:
    assert depths(draft.parents) == [len(path_to(draft.parents, n)) - 1 for n in range(len(draft))]


@given(trees())
def test_children_and_parents_agree(draft: Draft) -> None:
    below = children(draft.parents)
    assert len(below) == len(draft) + 1
    assert {(parent, child) for child, parent in enumerate(draft.parents)} == {
        (parent, child) for parent in range(-1, len(draft)) for child in below[parent]
    }


def test_a_chain_is_a_chain_and_a_tree_is_not() -> None:
    assert is_chain(chain([5, 6, 7]).parents)
    assert is_chain(())
    assert not is_chain([-1, -1])
    assert not is_chain([-1, 0, 0])


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1], [-1, 5]])
def test_a_parent_must_come_before_its_child(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parent"):
        Draft([1] * len(parents), parents)


def test_tokens_and_parents_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 parents"):
        Draft([1, 2], [-1])


def test_chances_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 chances"):
        Draft([1, 2], [-1, 0], chances=[0.5])


def test_a_trie_stays_within_its_budget() -> None:
    trie = Trie()
    assert trie.add([1, 2, 3], budget=4) == [0, 1, 2]
    assert trie.add([1, 2, 4, 5], budget=4) == [0, 1, 3]
    assert trie.draft() == Draft((1, 2, 3, 4), (-1, 0, 1, 1))


@given(trees(), st.integers(-1, 6))
def test_trim_keeps_what_is_shallow_enough(draft: Draft, limit: int) -> None:
    cut, kept = trim(draft, limit)
    depth = depths(draft.parents)
    assert list(kept) == [node for node in range(len(draft)) if depth[node] < limit]
    for new, old in enumerate(kept):
        assert cut.tokens[new] == draft.tokens[old]
        assert [kept[n] for n in path_to(cut.parents, new)] == path_to(draft.parents, old)


def test_trim_moves_distributions_along_and_drops_unused_ones() -> None:
    rows = {-1: "root", 0: "first", 1: "second"}
    draft = Draft([1, 2, 3], [-1, 0, 1], distributions=rows)  # type: ignore[arg-type]
    assert trim(draft, 2)[0].distributions == {-1: "root", 0: "first"}


def test_chances_stay_with_their_nodes() -> None:
    draft = Draft([1, 2, 3, 4], [-1, 0, -1, 2], riders=1, chances=[0.6, 0.3, 0.2, 0.1])
    assert select(draft, [2, 0, 3]).chances == (0.2, 0.6, 0.1)
    assert draft.guesses.chances == [0.6, 0.3, 0.2]


@given(
    st.lists(st.floats(0, 1), max_size=12).map(lambda chances: sorted(chances, reverse=True)),
    st.sampled_from([0.0, 0.02, 0.1, 1.0]),
)
def test_as_many_nodes_as_give_most_tokens_for_the_time(chances: list[float], row_cost: float) -> None:
    def rate(nodes: int) -> float:
        return (1 + sum(chances[:nodes])) / (1 + row_cost * nodes)

    best = max(map(rate, range(len(chances) + 1)))
    assert rate(worthwhile(chances, row_cost)) == pytest.approx(best)


def test_few_leaves_keeps_the_first_or_the_likeliest() -> None:
    draft = Draft((1, 2, 3, 4, 5), (-1, -1, 0, 1, 0))
    assert few_leaves(draft, 3) == (draft, range(5))
    cut, kept = few_leaves(draft, 2)
    assert (cut.tokens, cut.parents, list(kept)) == ((1, 2, 3, 4), (-1, -1, 0, 1), [0, 1, 2, 3])
    assert few_leaves(draft, 1)[0].tokens == (1, 3)
    told = replace(draft, chances=(0.4, 0.9, 0.1, 0.8, 0.3))
    assert few_leaves(told, 1)[0].tokens == (2, 4)
    assert few_leaves(told, 2)[0].tokens == (1, 2, 4, 5)
    # What is kept of a sampled draft does not depend on its tokens, as chances do.
    sampled = replace(told, distributions={node: torch.ones(9) / 9 for node in (-1, *told.parents)})
    assert few_leaves(sampled, 1)[0].tokens == (1, 3)
