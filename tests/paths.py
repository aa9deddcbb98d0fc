"""The texts along the paths of a draft."""

from __future__ import annotations

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
