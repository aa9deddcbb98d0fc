"""Texts in llama.cpp's sequences, as data: which rows each lane contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class TextLane:
    """A sequence of llama.cpp.

    Attributes:
        number: its number in llama.cpp.
        rows: number of the first rows of the text's stem that it contains.
        path: nodes of the text's tree that it contains after the whole stem.
    """

    number: int
    rows: int = 0
    path: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Text:
    """The rows of one slot.

    Attributes:
        need: number of reserved rows.
        stem: number of committed rows that form a chain.
        tree: parents of the rows after the stem, which form a tree; -1 is the stem's last row.
        fed: number of the tree's last nodes, which the open forward fed; the others were kept before.
        lanes: the first contains the text; the others are added when drafts branch.
    """

    need: int
    lanes: list[TextLane]
    stem: int = 0
    tree: list[int] = field(default_factory=list)
    fed: int = 0

    @property
    def length(self) -> int:
        return self.stem + len(self.tree) - self.fed


@dataclass(frozen=True)
class FedRows:
    """Positions of the rows that a slot feeds, and the lanes that contain each of them."""

    positions: list[int]
    lanes: list[list[int]]


def is_path(parents: Sequence[int], nodes: Sequence[int]) -> bool:
    """True if these nodes are a path from the root, each the child of the one before."""
    return all(parents[node] == above for above, node in zip([-1, *nodes], nodes, strict=False))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two lists."""
    return next(
        (length for length, (token, other) in enumerate(zip(first, second, strict=False)) if token != other),
        min(len(first), len(second)),
    )
