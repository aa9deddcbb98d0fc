"""The most frequent beginnings of many continuations, as a tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outpace.core import Draft


def most_frequent(continuations: NDArray[np.int64], nodes: int) -> Draft:
    """The tree of the beginnings that most continuations share, the most frequent first.

    Among equals the shorter comes first. So a parent is before its children, and a tree cut after any node is
    the tree of a smaller budget.

    Args:
        continuations: token ids, shape [count, depth]; -1 from the end of one on.
        nodes: tokens of the tree at most.
    """
    count, depth = continuations.shape
    if not count or not depth:
        return Draft()
    rows = continuations[np.lexsort(continuations.T[::-1])]
    # Sorted, the rows that share a beginning lie together; starts[d, i] is true where row i begins a group of
    # rows equal in columns 0 to d.
    starts = np.ones((depth, count), np.bool_)
    starts[:, 1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1).T
    # Beginnings by depth, then by row: that of depth d and first row i has the place d * count + i.
    places = np.flatnonzero(starts)
    shared_by = np.diff(places, append=depth * count)
    tokens = rows.T.reshape(-1)[places]
    shared_by[tokens < 0] = 0
    chosen = np.argsort(-shared_by, kind="stable")[:nodes]
    chosen = chosen[shared_by[chosen] > 0]
    # The parent is the last beginning at or before place - count: one depth up, and its rows include this
    # one's first. At depth 0 there is none, index -1.
    parents = np.searchsorted(places, places[chosen] - count, side="right") - 1
    node = np.full(len(places) + 1, -1)
    node[chosen] = np.arange(len(chosen))
    return Draft(tokens[chosen].tolist(), node[parents].tolist())
