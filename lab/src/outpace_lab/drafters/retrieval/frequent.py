"""Trees of the most frequent prefixes of many continuations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outpace.core import Draft


def most_frequent(continuations: NDArray[np.int64], nodes: int) -> Draft:
    """The tree of the prefixes that most continuations share, the most frequent first.

    On a tie the shorter comes first. So a parent precedes its children, and the first n nodes are the tree of
    a budget of n.

    Args:
        continuations: token ids, shape [count, depth], padded with -1 at the end.
        nodes: maximum number of nodes.
    """
    count, depth = continuations.shape
    if not count or not depth:
        return Draft()
    rows = continuations[np.lexsort(continuations.T[::-1])]
    # Rows that share a prefix are adjacent after sorting; starts[d, i] is true if row i begins a group of
    # rows equal in columns 0 to d.
    starts = np.ones((depth, count), np.bool_)
    starts[:, 1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1).T
    # Prefixes by depth, then by row: the one of depth d and first row i has the place d * count + i.
    places = np.flatnonzero(starts)
    shared_by = np.diff(places, append=depth * count)
    tokens = rows.T.reshape(-1)[places]
    shared_by[tokens < 0] = 0
    chosen = np.argsort(-shared_by, kind="stable")[:nodes]
    chosen = chosen[shared_by[chosen] > 0]
    # The parent is the last prefix at or before place - count: one depth less, and its rows include this
    # prefix's first row. At depth 0 there is none, index -1.
    parents = np.searchsorted(places, places[chosen] - count, side="right") - 1
    node = np.full(len(places) + 1, -1)
    node[chosen] = np.arange(len(chosen))
    return Draft(tokens[chosen].tolist(), node[parents].tolist())
