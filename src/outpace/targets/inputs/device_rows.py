"""The rows of a forward on a device, and their attention masks, from lengths, tokens and parents alone.

Only these are copied to the device, and nothing is read back, so that a graph of fixed shapes can replay all
of it. On a CPU writing ranges of an array is much quicker than these gathers: ``masks.tree_masks`` makes the
dense form there, and a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import Window
from outpace.targets.rows import Rows
from outpace.transfer import upload

WORD = 64  # nodes in a word of a compact mask


def to_device(rows: Sequence[Rows], window: Window, device: torch.device) -> DeviceRows:
    """A forward's rows on a device, to which only tokens, lengths and parents are copied."""
    nodes = window.width + max(len(row.fed) for row in rows)
    numbers = row_numbers(rows, window.offsets, window.width, nodes)
    return read_numbers(upload(numbers, device), window.width)


def row_numbers(rows: Sequence[Rows], offsets: Sequence[int], width: int, nodes: int) -> NDArray[np.int64]:
    """Pack the data of a forward's rows that a device needs into one array [B, 3 + width + nodes].

    Per sequence: the number of rows before the tree, of the tree's rows fed before and of those fed now, the
    tokens of the latter, and the parents of all.

    Args:
        offsets: number of committed rows of each sequence.
        nodes: maximum number of rows of a tree, including those fed before.
    """
    numbers = np.full((len(rows), 3 + width + nodes), -1, dtype=np.int64)
    numbers[:, : 3 + width] = 0
    for sequence, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        numbers[sequence, :3] = offset - fed, fed, size
        numbers[sequence, 3 : 3 + size] = row.tokens
        numbers[sequence, 3 + width : 3 + width + fed + size] = row.tree
    return numbers


class Trees(NamedTuple):
    """Rows that each row of a forward attends to: the columns before its tree, and nodes of the tree.

    Attributes:
        base: the column of a tree's first node, [B, 1].
        real: True for rows that are not padding, [B, width].
        sees: the nodes that each row attends to, boolean [B, width, nodes].
        positions: positions of the rows, [B, width]; legal ones for padding.
        node_positions: positions of the nodes, [B, nodes].
    """

    base: Tensor
    real: Tensor
    sees: Tensor
    positions: Tensor
    node_positions: Tensor


class DeviceRows(NamedTuple):
    """The rows of a forward, on a device.

    Attributes:
        tokens: [B, width]; 0 in padding.
        rows: the cache row that each is written to, [B, width]; undefined for padding.
        trees: the rows that they attend to.
    """

    tokens: Tensor
    rows: Tensor
    trees: Trees


def read_numbers(numbers: Tensor, width: int) -> DeviceRows:
    """Unpack the array of ``row_numbers`` on its device, without reading it on the host."""
    base, fed, size = numbers[:, :3].split(1, dim=1)
    tokens, parents = numbers[:, 3 : 3 + width], numbers[:, 3 + width :]
    nodes = parents.shape[1]
    row = torch.arange(width, device=numbers.device)[None]
    node = (fed + row).clamp(max=nodes - 1)  # [B, width]: the node of its tree that each row is
    tree = ancestors(parents)
    at = base + tree.sum(dim=-1) - 1
    sees = tree.gather(1, node[..., None].expand(-1, -1, nodes))
    return DeviceRows(tokens, base + fed + row, Trees(base, row < size, sees, at.gather(1, node), at))


def dense(trees: Trees, columns: int, sliding: int | None) -> tuple[Tensor, Tensor]:
    """Make the masks of ``tree_masks`` on a device."""
    width, nodes = trees.sees.shape[1:]
    column = torch.arange(columns, device=trees.base.device)[None]
    held = column - trees.base  # [B, columns]: the node that a column holds; below 0 before the tree
    inside = (held >= 0) & (held < nodes)
    index = held.clamp(0, nodes - 1)
    seen = trees.sees.gather(2, index[:, None].expand(-1, width, -1)) & inside[:, None]
    seen = seen | (held < 0)[:, None]
    first = (column == 0)[:, None]
    full = near = torch.where(trees.real[..., None], seen, first)[:, None]
    if sliding is not None and sliding < columns:
        column_at = torch.where(inside, trees.node_positions.gather(1, index), column)
        seen = seen & (column_at[:, None, :] > trees.positions[..., None] - sliding)
        near = torch.where(trees.real[..., None], seen, first)[:, None]
    return full, near


def compact(trees: Trees, sliding: int | None) -> tuple[Tensor, Tensor]:
    """Make the masks of ``dense`` in a form without columns, int64 [B, 1, width, 2 + words].

    Per row: the column of its tree's first node, the first column before it that the row attends to, and a
    bit mask of the nodes that it attends to, 64 per word. Padding attends to no row.
    """
    sees = trees.sees & trees.real[..., None]
    base = trees.base.expand(-1, sees.shape[1])
    full = near = _words(base, torch.where(trees.real, 0, base), sees)
    if sliding is not None:
        low = torch.where(trees.real, (trees.positions - sliding + 1).clamp(min=0), base)
        sees = sees & (trees.node_positions[:, None, :] > trees.positions[..., None] - sliding)
        near = _words(base, low, sees)
    return full, near


def _words(base: Tensor, low: Tensor, sees: Tensor) -> Tensor:
    nodes = sees.shape[2]
    bits = torch.nn.functional.pad(sees, (0, -nodes % WORD)).unflatten(2, (-1, WORD)).long()
    words = (bits << torch.arange(WORD, device=sees.device)).sum(dim=-1)
    return torch.cat([base[..., None], low[..., None], words], dim=-1)[:, None]


def in_order(trees: Trees, sliding: int | None) -> tuple[Tensor, Tensor]:
    """Make the masks of ``dense`` in the order of each row's text, int32 [B, 1, width, 4 + nodes].

    Per row: the first position that it attends to; the position of its tree's first node; a position up to
    which each is in the column of the same number; the position after the last one; the columns of the
    positions from the tree on. Padding attends to no row.
    """
    count = torch.where(trees.real, trees.sees.sum(dim=-1), 0)
    base = trees.base.expand_as(count)
    # The nodes that a row attends to, in their order, and then the others.
    path = (~trees.sees).to(torch.uint8).sort(dim=-1, stable=True).indices
    straight = (path == torch.arange(path.shape[-1], device=path.device)).to(torch.uint8)
    whole = base + torch.minimum(straight.cummin(dim=-1).values.sum(dim=-1), count)
    end = torch.where(trees.real, base + count, 0)
    columns = base[..., None] + path

    def mask(low: Tensor) -> Tensor:
        fields = torch.stack([torch.where(trees.real, low, 0), base, whole, end], dim=-1)
        return torch.cat([fields, columns], dim=-1)[:, None].int()

    full = near = mask(torch.zeros_like(base))
    if sliding is not None:
        near = mask((trees.positions - sliding + 1).clamp(min=0))
    return full, near


def ancestors(parents: Tensor) -> Tensor:
    """``tree.ancestor_mask`` of trees on a device: parents [B, n] -> [B, n, n].

    Each round doubles the number of ancestors that a node has found.
    """
    size = parents.shape[1]
    above = torch.arange(size, device=parents.device)[None]
    above = torch.where(parents < 0, above, parents)
    seen = torch.eye(size, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    for _ in range((size - 1).bit_length()):
        seen = seen | seen.gather(1, above[..., None].expand(-1, -1, size))
        above = above.gather(1, above)
    return seen
