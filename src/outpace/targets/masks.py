"""Attention masks over committed rows and a tree, in the forms that transformers' models take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import Window
from outpace.core import UnsupportedModel
from outpace.targets.base import Rows
from outpace.tree import ancestor_mask, chain_mask, depths, is_chain

_FULL = "full_attention"
_SLIDING = "sliding_attention"
WORD = 64  # nodes in a word of a compact mask

# Attention over compact masks (``tree_attention.py``).
TREE = "outpace_tree"

# What a model takes as attention_mask. None where its own causal mask is the right one.
Mask = Tensor | dict[str, Tensor | None] | None


class MaskMaker:
    """Masks [B, 1, width, columns] for one model.

    Boolean where attention runs on sdpa, additive where it is eager (there a boolean mask would be *added*),
    and ``compact`` where it is our own.
    A model whose config lists ``layer_types`` gets a dict with one mask per kind; else a ``sliding_window``
    in the config is cut from the one mask.

    Attributes:
        by_kind: whether the model takes a dict. Some list ``layer_types`` and take none; the target tries.

    Raises:
        UnsupportedModel: attention of a kind, or an implementation of it, that no tree mask is known for.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._compact = config._attn_implementation == TREE
        self._additive = not self._compact and _additive(config)
        kinds = getattr(config, "layer_types", None)
        self._kinds = sorted(set(kinds)) if kinds else []
        unknown = set(self._kinds) - {_FULL, _SLIDING}
        if unknown:
            raise UnsupportedModel(
                f"{config.model_type} has attention layers of kind {', '.join(sorted(unknown))}, whose mask "
                "is not known here, or whose rows see more than their ancestors"
            )
        self.by_kind = bool(self._kinds)
        window = getattr(config, "sliding_window", None) or None  # some configs have 0 for none
        self._sliding: int | None = window if not self._kinds or _SLIDING in self._kinds else None

    @property
    def kinds(self) -> int:
        """Kinds of masks the layers need: a model that takes no dict can have only one."""
        return max(len(self._kinds), 1)

    def one(self, device: torch.device) -> Mask:
        """The mask of a single token that sees itself."""
        seen = torch.ones((1, 1, 1), dtype=torch.bool, device=device)
        return self.given(seen, torch.zeros((1, 1), dtype=torch.long, device=device))

    def given(self, seen: Tensor, positions: Tensor) -> Mask:
        """The mask of a forward without a cache. ``seen``: [B, N, N]; ``positions``: of each row, [B, N]."""
        base, real = torch.zeros_like(positions[:, :1]), torch.ones_like(positions, dtype=torch.bool)
        return self.of(Trees(base, real, seen, positions, positions), seen.shape[2])

    def of(self, trees: Trees, columns: int) -> Mask:
        """The mask or masks of a forward whose rows are on the device."""
        if self._compact:
            return self._form(*compact(trees, self._sliding))
        return self._form(*dense(trees, columns, self._sliding))

    def __call__(
        self, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]], device: torch.device
    ) -> Mask:
        """The mask or masks of a forward. ``positions``: of each row, [B][width]."""
        if self._compact or (device.type != "cpu" and not self._is_plain(rows, window)):
            return self.of(placed_on(rows, window, device).trees, window.columns)
        if self._is_plain(rows, window):
            return dict.fromkeys(self._kinds) if self.by_kind else None
        return self._form(*tree_masks(rows, window, positions, self._sliding))

    def _is_plain(self, rows: Sequence[Rows], window: Window) -> bool:
        """Tell whether the model's own causal mask will do: no mask lets sdpa pick its fastest kernels.

        That is one row for each sequence, all of one length; or, on sdpa, which takes no mask for a causal
        one, the first rows of a text.
        """
        if window.span is None or (self._sliding is not None and window.columns > self._sliding):
            return False
        chains = all(row.parents is None or is_chain(row.tree) for row in rows)
        return chains and (window.width == 1 or (window.span.start == 0 and not self._additive))

    def _form(self, full: Tensor, near: Tensor) -> Mask:
        """Masks as the model takes them.

        Args:
            full, near: what a row sees, in all and within the window: boolean [B, 1, width, columns], or
                compact.
        """
        if not self.by_kind:
            return self._tensor(full if self._sliding is None else near)
        # Below the window both are one tensor, and one mask will do.
        masks = {kind: near if kind == _SLIDING else full for kind in self._kinds}
        tensors = {key: self._tensor(mask) for key, mask in {id(m): m for m in masks.values()}.items()}
        return {kind: tensors[id(mask)] for kind, mask in masks.items()}

    def _tensor(self, seen: Tensor) -> Tensor:
        """A mask as the attention takes it."""
        if not self._additive:
            return seen
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self._dtype).min)


def _additive(config: Any) -> bool:
    """Tell whether the attention of a model adds its mask.

    Raises:
        UnsupportedModel: it is not known to take a mask of ours at all.
    """
    implementation = config._attn_implementation
    if implementation == "eager":
        return True
    if implementation == "sdpa":
        return False
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

    # An attention function of the user's own, registered through AttentionInterface: its mask's form is known
    # if it is registered too.
    form = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
    if form in (eager_mask, sdpa_mask):
        return bool(form is eager_mask)
    raise UnsupportedModel(
        f"{config.model_type} runs on attn_implementation={implementation!r}, which takes no tree mask; "
        "load the model with 'sdpa', 'eager' or 'outpace_tree'"
    )


def tree_masks(
    rows: Sequence[Rows],
    window: Window,
    positions: Sequence[Sequence[int]],
    sliding: int | None,
) -> tuple[Tensor, Tensor]:
    """Two masks [B, 1, width, columns], made on the CPU: all that a row sees, and that within the window.

    A row sees the committed rows and its ancestors; padding sees column 0. The second is the first without
    the columns whose position is ``sliding`` or more before the row's own.
    """
    mask = np.zeros((len(rows), 1, window.width, window.columns), dtype=np.bool_)
    for place, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        base = offset - fed
        mask[place, 0, :size, :base] = True
        mask[place, 0, :size, base : offset + size] = _ancestors(row)
        mask[place, 0, size:, 0] = True
    full = torch.from_numpy(mask)
    at = np.asarray(positions)
    if sliding is None or at.max() < sliding:
        return full, full
    near = mask.copy()
    columns = column_positions(rows, window, at)
    for place, row in enumerate(rows):
        size = len(row.tokens)
        near[place, 0, :size] &= columns[place, None, :] > at[place, :size, None] - sliding
    return full, torch.from_numpy(near)


def placed_on(rows: Sequence[Rows], window: Window, device: torch.device) -> Placed:
    """A forward's rows on a device: only tokens, lengths and parents are copied to it."""
    nodes = window.width + max(len(row.fed) for row in rows)
    numbers = torch.from_numpy(packed(rows, window.offsets, window.width, nodes))
    return placed(numbers.to(device, non_blocking=True), window.width)


def packed(rows: Sequence[Rows], offsets: Sequence[int], width: int, nodes: int) -> NDArray[np.int64]:
    """All that a device must know of a forward's rows, in one array [B, 3 + width + nodes].

    Of each sequence: its rows before the tree, the tree's rows that were fed before and those fed now, the
    tokens of the latter, and the parents of all.

    Args:
        offsets: committed rows of each sequence.
        nodes: most rows of a tree, those fed before included.
    """
    numbers = np.full((len(rows), 3 + width + nodes), -1, dtype=np.int64)
    numbers[:, : 3 + width] = 0
    for place, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        numbers[place, :3] = offset - fed, fed, size
        numbers[place, 3 : 3 + size] = row.tokens
        numbers[place, 3 + width : 3 + width + fed + size] = row.tree
    return numbers


class Trees(NamedTuple):
    """Rows that each row of a forward sees: the columns before its tree, and nodes of the tree.

    Attributes:
        base: the column that holds a tree's first node, [B, 1].
        real: which rows are no padding, [B, width].
        sees: which nodes each row sees, [B, width, nodes].
        positions: of the rows, [B, width]; legal ones in padding.
        node_positions: [B, nodes].
    """

    base: Tensor
    real: Tensor
    sees: Tensor
    positions: Tensor
    node_positions: Tensor


class Placed(NamedTuple):
    """The rows of a forward, on a device.

    Attributes:
        tokens: [B, width]; 0 in padding.
        rows: of the cache, that each is written to, [B, width]; of no meaning in padding.
        trees: what they see.
    """

    tokens: Tensor
    rows: Tensor
    trees: Trees


def placed(numbers: Tensor, width: int) -> Placed:
    """Unpack what ``packed`` packed, on its device; the host reads none of it."""
    base, fed, size = numbers[:, :3].split(1, dim=1)
    tokens, parents = numbers[:, 3 : 3 + width], numbers[:, 3 + width :]
    nodes = parents.shape[1]
    own = torch.arange(width, device=numbers.device)[None]
    node = (fed + own).clamp(max=nodes - 1)  # [B, width]: each row's place in its tree
    tree = ancestors(parents)
    at = base + tree.sum(dim=-1) - 1
    sees = tree.gather(1, node[..., None].expand(-1, -1, nodes))
    return Placed(tokens, base + fed + own, Trees(base, own < size, sees, at.gather(1, node), at))


def dense(trees: Trees, columns: int, sliding: int | None) -> tuple[Tensor, Tensor]:
    """The masks of ``tree_masks``, made on a device."""
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
    """The masks of ``dense`` in a form without columns, int64 [B, 1, width, 2 + words].

    Of each row: the column of its tree's first node, the first column before that which it sees, and the
    nodes that it sees, a bit each, 64 in a word. Padding sees nothing.
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


def ancestors(parents: Tensor) -> Tensor:
    """``tree.ancestor_mask`` of trees on a device: parents [B, n] -> [B, n, n].

    Each round doubles how far up a node has looked.
    """
    size = parents.shape[1]
    above = torch.arange(size, device=parents.device)[None]
    above = torch.where(parents < 0, above, parents)
    seen = torch.eye(size, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    for _ in range((size - 1).bit_length()):
        seen = seen | seen.gather(1, above[..., None].expand(-1, -1, size))
        above = above.gather(1, above)
    return seen


def _ancestors(row: Rows) -> NDArray[np.bool_]:
    """[rows fed now, rows of the tree]: which nodes of its tree each row sees."""
    return chain_mask(len(row.tokens)) if row.parents is None else ancestor_mask(row.tree)[len(row.fed) :]


def column_positions(rows: Sequence[Rows], window: Window, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, columns]: a committed row's column is its position; a tree's column has its node's position."""
    columns = np.tile(np.arange(window.columns), (len(rows), 1))
    for place, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        if fed:
            columns[place, offset - fed : offset] = [offset - fed + depth for depth in depths(row.fed)]
        columns[place, offset : offset + size] = positions[place, :size]
    return columns
