"""Trees of guessed tokens, as lists of parents: masks, depths, chains, tries. Pure functions.

A tree of n nodes is ``parents[n]`` with ``parents[i] < i``; -1 is the root, the last committed token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outpace.core import Draft


def chain(tokens: Sequence[int]) -> Draft:
    """A draft in which each token follows the one before it."""
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node; a child of the root has depth 0."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def children(parents: Sequence[int]) -> list[list[int]]:
    """Children of each node, in order; the root's are the last entry, so index -1 maps to them."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        found[parent].append(node)
    return found


def is_chain(parents: Sequence[int]) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(parents))


@lru_cache(maxsize=64)
def chain_mask(size: int) -> NDArray[np.bool_]:
    """Attention along a chain, shape [size, size]."""
    return np.tri(size, dtype=np.bool_)


def ancestor_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Attention among the nodes, shape [n, n]: row i attends to column j if j is i or an ancestor of i."""
    size = len(parents)
    if is_chain(parents):
        return chain_mask(size)
    # A row is an integer whose bit j is set if it attends to j: a child's row is its parent's plus one bit.
    rows: list[int] = []
    for node, parent in enumerate(parents):
        rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
    width = (size + 7) // 8
    packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(size, width), axis=1, count=size, bitorder="little")
    return bits.view(np.bool_)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root's child down to ``node``; empty for the root (-1)."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class Trie:
    """Token sequences merged under one root into a tree without equal siblings.

    For drafters that choose. Siblings drawn with replacement must not be merged: each is a separate trial.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._index: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Sequence[int], under: int = -1, budget: int | None = None) -> list[int]:
        """Add a chain below a node and return its nodes; stop when the trie has ``budget`` nodes."""
        nodes: list[int] = []
        for token in tokens:
            node = self._index.get((under, token))
            if node is None:
                if budget is not None and len(self.tokens) >= budget:
                    break
                node = self._index[under, token] = self.append(token, under)
            nodes.append(node)
            under = node
        return nodes

    def append(self, token: int, parent: int) -> int:
        """Add a separate node, even beside an equal sibling; later chains are not merged into it."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def draft(self) -> Draft:
        return Draft(tuple(self.tokens), tuple(self.parents))


def trim(draft: Draft, max_depth: int, max_nodes: int | None = None) -> tuple[Draft, Sequence[int]]:
    """Remove nodes at ``max_depth`` or deeper, and all but the first ``max_nodes`` of the others.

    Returns:
        The trimmed draft, and for each of its nodes its node in the draft before.
    """
    if not draft.parents:  # the shortcut of every plain step
        return draft, ()
    depth = depths(draft.parents)
    # A parent is shallower than its children and precedes them, so the kept nodes are closed under parents.
    kept = [node for node in range(len(draft)) if depth[node] < max_depth][:max_nodes]
    return select(draft, kept), kept


def few_leaves(draft: Draft, most: int) -> tuple[Draft, Sequence[int]]:
    """Remove nodes until the draft has at most ``most`` leaves.

    The least likely ones are removed first if the draft states chances, otherwise the last ones; the last
    ones also if it was sampled, since what is verified of it may not depend on what was drawn.

    Returns:
        The draft, and for each of its nodes its node in the draft before.
    """
    leaves = len(draft) - len(set(draft.parents) - {-1})
    if leaves <= most:
        return draft, range(len(draft))
    order: Sequence[int] = range(len(draft))
    if draft.chances is not None and draft.distributions is None:
        chances = draft.chances
        order = sorted(order, key=lambda node: -chances[node])  # stable: a parent stays before its children
    kept, inner, count = {-1}, {-1}, 0
    for node in order:
        parent = draft.parents[node]
        another = parent in inner  # otherwise the parent was a leaf, which this node replaces
        if parent in kept and (count < most or not another):
            kept.add(node)
            inner.add(parent)
            count += another
    chosen = sorted(kept - {-1})
    return select(draft, chosen), chosen


def select(draft: Draft, kept: Sequence[int]) -> Draft:
    """The draft of the nodes ``kept``, in this order; it must contain parents first and riders last."""
    if list(kept) == list(range(len(draft))):
        return draft
    place = {old: new for new, old in enumerate(kept)} | {-1: -1}
    tokens = tuple(draft.tokens[node] for node in kept)
    parents = tuple(place[draft.parents[node]] for node in kept)
    distributions = None
    if draft.distributions is not None:
        # A parent whose children were all cut needs no distribution.
        used = set(parents)
        distributions = {
            place[old]: row for old, row in draft.distributions.items() if old in place and place[old] in used
        }
    riders = sum(node >= len(draft) - draft.riders for node in kept)
    chances = None if draft.chances is None else tuple(draft.chances[node] for node in kept)
    return Draft(tokens, parents, distributions, draft.replacement, riders, chances)


def worthwhile(chances: Sequence[float], row_cost: float) -> int:
    """Number of nodes that maximises the expected tokens per time.

    Args:
        chances: acceptance probability per node, in descending order.
        row_cost: time of a node as a share of a plain step.
    """
    tokens, seconds = 1.0, 1.0
    for nodes, chance in enumerate(chances):
        if chance * seconds <= row_cost * tokens:
            return nodes
        tokens += chance
        seconds += row_cost
    return len(chances)
