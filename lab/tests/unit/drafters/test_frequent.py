"""The tree of the most frequent beginnings against counting every beginning."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outpace_lab.drafters.retrieval.frequent import most_frequent
from paths import paths

DEPTH = 4


def padded(texts: list[list[int]]) -> np.ndarray:
    rows = [(text + [-1] * DEPTH)[:DEPTH] for text in texts]
    return np.array(rows, np.int64).reshape(len(rows), DEPTH)


@given(st.lists(st.lists(st.integers(0, 2), max_size=DEPTH), max_size=12), st.integers(1, 15))
def test_nodes_are_the_most_frequent_beginnings(texts: list[list[int]], nodes: int) -> None:
    counts = Counter(tuple(text[: end + 1]) for text in texts for end in range(len(text)))
    expected = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:nodes]
    assert paths(most_frequent(padded(texts), nodes)) == expected


def test_large_token_ids() -> None:
    draft = most_frequent(padded([[2**31, 2**17], [2**31, 7], [2**31, 2**17]]), 8)
    assert paths(draft) == [(2**31,), (2**31, 2**17), (2**31, 7)]


def test_nothing_of_nothing() -> None:
    assert len(most_frequent(np.empty((0, DEPTH), np.int64), 4)) == 0
    assert len(most_frequent(padded([[], []]), 4)) == 0
