"""Paths of drafts and of random trees."""

from __future__ import annotations

import torch

from outpace.core import Draft


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The text on the way to each node."""
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        texts.append((*(texts[parent] if parent >= 0 else ()), token))
    return texts


def distinct_paths(draft: Draft) -> set[tuple[int, ...]]:
    """The same as a set, once it is sure that no siblings are equal."""
    texts = paths(draft)
    assert len(set(texts)) == len(texts), "equal siblings"
    return set(texts)


def random_tree(size: int, seed: int) -> tuple[list[int], list[list[int]]]:
    """Parents of a random tree, and the path of each node."""
    generator = torch.Generator().manual_seed(seed)
    parents, paths = [-1], [[0]]
    for node in range(1, size):
        parents.append(int(torch.randint(max(0, node - 5), node, (1,), generator=generator)))
        paths.append([*paths[parents[-1]], node])
    return parents, paths
