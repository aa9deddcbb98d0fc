"""Attention masks over committed rows and a tree, in the forms that transformers' models accept."""

from __future__ import annotations

import copy
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

# Attention over compact masks (``gpu/tree_attention.py``), and over masks in the order of the text
# (``gpu/invariant.py``).
TREE, INVARIANT = "outpace_tree", "outpace_invariant"

# A model's attention_mask. None if its own causal mask is the right one.
Mask = Tensor | dict[str, Tensor | None] | None


class MaskMaker:
    """Masks [B, 1, width, columns] for one model.

    Boolean for sdpa, additive for eager attention (which would *add* a boolean mask), ``compact`` for
    ``outpace_tree``, and ``in_order`` for ``outpace_invariant``.
    A model whose config lists ``layer_types`` gets a dict with one mask per kind; otherwise a
    ``sliding_window`` in the config is applied to the single mask.

    Args:
        fused: the model's layers are fused: they know without a mask that rows attend to all before them.

    Attributes:
        by_kind: the model accepts a dict. Some list ``layer_types`` but do not; the target tests it.

    Raises:
        UnsupportedModel: no tree mask is known for the implementation of attention.
    """

    def __init__(self, config: Any, dtype: torch.dtype, fused: bool = False) -> None:
        self._dtype = dtype
        self._fused = fused
        self._encode = {TREE: compact, INVARIANT: in_order}.get(config._attn_implementation)
        self._additive = self._encode is None and _additive(config)
        kinds = getattr(config, "layer_types", None)
        self._kinds = sorted(set(kinds)) if kinds else []
        self._window: tuple[int, int] | None = None
        self.by_kind = bool(self._kinds)
        window = getattr(config, "sliding_window", None) or None  # some configs have 0 for none
        self._sliding: int | None = window if not self._kinds or _SLIDING in self._kinds else None

    def over_window(self, sinks: int, recent: int) -> MaskMaker:
        """A maker of masks that hide all committed rows but the first ones and the most recent ones.

        Raises:
            UnsupportedModel: the attention's form of mask cannot express that.
        """
        if self._encode is not None:
            raise UnsupportedModel(
                "this target's attention cannot attend to a part of the committed rows; load the model with "
                "attn_implementation='sdpa', and on a GPU give exact=False"
            )
        found = copy.copy(self)
        found._window = sinks, recent
        return found

    @property
    def kinds(self) -> int:
        """Number of kinds of masks that the layers need; a model without a dict can have only one."""
        return max(len(self._kinds), 1)

    def one(self, device: torch.device) -> Mask:
        """The mask of a single token that attends to itself."""
        seen = torch.ones((1, 1, 1), dtype=torch.bool, device=device)
        return self.given(seen, torch.zeros((1, 1), dtype=torch.long, device=device))

    def given(self, seen: Tensor, positions: Tensor) -> Mask:
        """The mask of a forward without a cache. ``seen``: [B, N, N]; ``positions`` of the rows: [B, N]."""
        base, real = torch.zeros_like(positions[:, :1]), torch.ones_like(positions, dtype=torch.bool)
        return self.of(Trees(base, real, seen, positions, positions), seen.shape[2])

    def of(self, trees: Trees, columns: int) -> Mask:
        """The mask or masks of a forward whose rows are on the device."""
        if self._encode is not None:
            return self._form(*self._encode(trees, self._sliding))
        return self._form(*dense(trees, columns, self._sliding))

    def __call__(
        self, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]], device: torch.device
    ) -> Mask:
        """The mask or masks of a forward. ``positions`` of the rows: [B][width]."""
        if self._window is not None and max(window.offsets) > sum(self._window):
            made = tree_masks(rows, window, positions, self._sliding)
            for mask in made:
                _hide(mask, window.offsets, *self._window)
            return self._form(*(mask.to(device) for mask in made))
        if self._encode is not None or (device.type != "cpu" and not self._is_plain(rows, window)):
            return self.of(placed_on(rows, window, device).trees, window.columns)
        if self._is_plain(rows, window):
            return dict.fromkeys(self._kinds) if self.by_kind else None
        if self._fused and self._are_chains(rows, window):
            return self._form(*2 * (torch.ones((1, 1, 1, 0), dtype=torch.bool),))
        return self._form(*tree_masks(rows, window, positions, self._sliding))

    def _is_plain(self, rows: Sequence[Rows], window: Window) -> bool:
        """True if the model's own causal mask suffices; without a mask sdpa uses its fastest kernels.

        This is one row per sequence, all of one length; or, on sdpa, for which no mask means a causal one,
        the first rows of a text.
        """
        if window.span is None or not self._are_chains(rows, window):
            return False
        return window.width == 1 or (window.span.start == 0 and not self._additive)

    def _are_chains(self, rows: Sequence[Rows], window: Window) -> bool:
        """True if each row attends to all before it: there are no branches, and no sliding window's end."""
        if self._sliding is not None and window.columns > self._sliding:
            return False
        return all(row.parents is None or is_chain(row.tree) for row in rows)

    def _form(self, full: Tensor, near: Tensor) -> Mask:
        """Convert masks to the model's form.

        Args:
            full, near: the rows that each row attends to, all and within the sliding window: boolean
                [B, 1, width, columns], or in a form without columns.
        """
        if not self.by_kind:
            return self._tensor(full if self._sliding is None else near)
        # Within the window both are the same tensor, and one mask suffices.
        masks = {kind: near if kind == _SLIDING else full for kind in self._kinds}
        tensors = {key: self._tensor(mask) for key, mask in {id(m): m for m in masks.values()}.items()}
        return {kind: tensors[id(mask)] for kind, mask in masks.items()}

    def _tensor(self, seen: Tensor) -> Tensor:
        """Convert a mask to the attention's form."""
        if not self._additive:
            return seen
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self._dtype).min)


class OwnMasks(MaskMaker):
    """Leaves the mask to the model: for chains of one sequence at a time, without padding."""

    def __init__(self) -> None:
        self.by_kind = False
        self._kinds = []

    def over_window(self, sinks: int, recent: int) -> MaskMaker:
        raise UnsupportedModel(
            "this target takes chains only, with the model's own mask, which cannot hide a part of the "
            "committed rows; use another drafter"
        )

    def one(self, device: torch.device) -> Mask:
        return None

    def of(self, trees: Trees, columns: int) -> Mask:
        raise UnsupportedModel(
            "this target takes chains only, with the model's own mask, so it cannot be trained through; use "
            "a drafter without trained parts"
        )

    def __call__(
        self, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]], device: torch.device
    ) -> Mask:
        return None


def unknown_kinds(config: Any) -> list[str]:
    """The kinds of attention layers in a config whose masks are not known here."""
    kinds = getattr(config, "layer_types", None) or ()
    return sorted(set(kinds) - {_FULL, _SLIDING})


def _additive(config: Any) -> bool:
    """True if the attention of a model adds its mask.

    Raises:
        UnsupportedModel: it is not known to support a tree mask.
    """
    implementation = config._attn_implementation
    if implementation == "eager":
        return True
    if implementation == "sdpa":
        return False
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

    # A user's attention function, registered through AttentionInterface: its mask's form is known if it is
    # registered too.
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
    """Make two masks [B, 1, width, columns] on the CPU: the full one, and that within the sliding window.

    A row attends to the committed rows and its ancestors; padding attends to column 0. The second mask
    excludes the columns whose position is ``sliding`` or more before the row's own.
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


def _hide(mask: Tensor, offsets: Sequence[int], sinks: int, recent: int) -> None:
    """Hide the committed rows after the first ones and before the most recent ones, in place."""
    for own, offset in zip(mask, offsets, strict=True):
        own[..., sinks : max(offset - recent, sinks)] = False


def placed_on(rows: Sequence[Rows], window: Window, device: torch.device) -> Placed:
    """A forward's rows on a device, to which only tokens, lengths and parents are copied."""
    nodes = window.width + max(len(row.fed) for row in rows)
    numbers = torch.from_numpy(packed(rows, window.offsets, window.width, nodes))
    return placed(numbers.to(device, non_blocking=True), window.width)


def packed(rows: Sequence[Rows], offsets: Sequence[int], width: int, nodes: int) -> NDArray[np.int64]:
    """Pack the data of a forward's rows that a device needs into one array [B, 3 + width + nodes].

    Per sequence: the number of rows before the tree, of the tree's rows fed before and of those fed now, the
    tokens of the latter, and the parents of all.

    Args:
        offsets: number of committed rows of each sequence.
        nodes: maximum number of rows of a tree, including those fed before.
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


class Placed(NamedTuple):
    """The rows of a forward, on a device.

    Attributes:
        tokens: [B, width]; 0 in padding.
        rows: the cache row that each is written to, [B, width]; undefined for padding.
        trees: the rows that they attend to.
    """

    tokens: Tensor
    rows: Tensor
    trees: Trees


def placed(numbers: Tensor, width: int) -> Placed:
    """Unpack the array of ``packed`` on its device, without reading it on the host."""
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


def _ancestors(row: Rows) -> NDArray[np.bool_]:
    """The nodes of the tree that each row attends to, boolean [rows fed now, rows of the tree]."""
    return chain_mask(len(row.tokens)) if row.parents is None else ancestor_mask(row.tree)[len(row.fed) :]


def column_positions(rows: Sequence[Rows], window: Window, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of the columns, [B, columns]: the index of a committed row, the position of a tree's node."""
    columns = np.tile(np.arange(window.columns), (len(rows), 1))
    for place, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        if fed:
            columns[place, offset - fed : offset] = [offset - fed + depth for depth in depths(row.fed)]
        columns[place, offset : offset + size] = positions[place, :size]
    return columns
