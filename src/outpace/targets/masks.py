"""Attention masks over committed rows and a tree, in the forms that transformers' models take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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

# What a model takes as attention_mask. None where its own causal mask is the right one.
Mask = Tensor | dict[str, Tensor | None] | None


class MaskMaker:
    """Masks [B, 1, width, columns] for one model.

    Boolean where attention runs on sdpa, additive where it is eager (there a boolean mask would be *added*).
    A model whose config lists ``layer_types`` gets a dict with one mask per kind; else a ``sliding_window``
    in the config is cut from the one mask.

    Args:
        fixed: masks of one shape are written to one tensor, in place.

    Attributes:
        by_kind: whether the model takes a dict. Some list ``layer_types`` and take none; the target tries.

    Raises:
        UnsupportedModel: attention of a kind, or an implementation of it, that no tree mask is known for.
    """

    def __init__(self, config: Any, dtype: torch.dtype, fixed: bool = False) -> None:
        self._dtype = dtype
        self._fixed = fixed
        self._buffers: dict[tuple[torch.Size, str], Tensor] = {}
        self._additive = _additive(config)
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
        seen = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        return self._form(seen, seen, device)

    def given(self, seen: Tensor, positions: Tensor) -> Mask:
        """The mask of a forward without a cache. ``seen``: [B, N, N]; ``positions``: of each row, [B, N]."""
        near = seen
        if self._sliding is not None:
            near = seen & (positions[:, None, :] > positions[:, :, None] - self._sliding)
        full = seen[:, None]
        return self._form(full, full if self._sliding is None else near[:, None], seen.device)

    def __call__(
        self, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]], device: torch.device
    ) -> Mask:
        """The mask or masks of a forward. ``positions``: of each row, [B][width]."""
        if self._is_plain(rows, window):
            return dict.fromkeys(self._kinds) if self.by_kind else None
        make = tree_masks if device.type == "cpu" else tree_masks_on
        full, near = make(rows, window, positions, self._sliding, device)
        return self._form(full, near, device)

    def _is_plain(self, rows: Sequence[Rows], window: Window) -> bool:
        """Tell whether the model's own causal mask will do: no mask lets sdpa pick its fastest kernels.

        That is one row for each sequence, all of one length; or, on sdpa, which takes no mask for a causal
        one, the first rows of a text.
        """
        if window.span is None or (self._sliding is not None and window.columns > self._sliding):
            return False
        chains = all(row.parents is None or is_chain(row.tree) for row in rows)
        return chains and (window.width == 1 or (window.span.start == 0 and not self._additive))

    def _form(self, full: Tensor, sliding: Tensor, device: torch.device) -> Mask:
        if not self.by_kind:
            return self._tensor(full if self._sliding is None else sliding, device)
        masks = {kind: sliding if kind == _SLIDING else full for kind in self._kinds}
        if self._fixed:
            return {kind: self._tensor(mask, device, kind) for kind, mask in masks.items()}
        # Below the window both are one tensor, and one mask will do.
        distinct = {id(mask): mask for mask in masks.values()}
        tensors = {key: self._tensor(mask, device) for key, mask in distinct.items()}
        return {kind: tensors[id(mask)] for kind, mask in masks.items()}

    def _tensor(self, seen: Tensor, device: torch.device, kind: str = _FULL) -> Tensor:
        """A mask in the form that the model takes, on its device."""
        if not self._additive and not self._fixed:
            return seen.to(device)
        dtype = self._dtype if self._additive else torch.bool
        mask = self._buffers.get((seen.shape, kind))
        if mask is None:
            mask = torch.empty(seen.shape, dtype=dtype, device=device)
            if self._fixed:
                self._buffers[seen.shape, kind] = mask
        if not self._additive:
            return mask.copy_(seen)
        return mask.zero_().masked_fill_(~seen.to(device), torch.finfo(dtype).min)


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
        "load the model with 'sdpa' or 'eager'"
    )


def tree_masks(
    rows: Sequence[Rows],
    window: Window,
    positions: Sequence[Sequence[int]],
    sliding: int | None,
    device: torch.device,
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


def tree_masks_on(
    rows: Sequence[Rows],
    window: Window,
    positions: Sequence[Sequence[int]],
    sliding: int | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The masks of ``tree_masks``, made on a device: only trees, lengths and positions are copied to it."""
    width = window.width
    most = width + max(len(row.fed) for row in rows)  # nodes of a tree, those fed before included
    trees = np.zeros((len(rows), width, most), dtype=np.bool_)
    numbers = np.zeros((len(rows), 2 + width + most), dtype=np.int64)
    for place, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        trees[place, :size, : fed + size] = _ancestors(row)
        numbers[place, :2] = offset - fed, size
        numbers[place, 2 : 2 + width] = positions[place]
        numbers[place, 2 + width : 2 + width + fed + size] = depths(row.tree)
    base, sizes, at, deep = torch.from_numpy(numbers).to(device).split([1, 1, width, most], dim=1)
    columns = torch.arange(window.columns, device=device)[None]
    node = columns - base  # [B, columns]: which node a column holds; below 0 for the rows before the tree
    inside = (node >= 0) & (node < most)
    index = node.clamp(0, most - 1)
    tree = torch.from_numpy(trees).to(device).gather(2, index[:, None].expand(-1, width, -1))
    seen = (tree & inside[:, None]) | (node < 0)[:, None]
    padding = (torch.arange(width, device=device)[None] >= sizes)[..., None]
    first = (columns == 0)[:, None]
    full = torch.where(padding, first, seen)[:, None]
    if sliding is None:
        return full, full
    column_at = torch.where(inside, base + deep.gather(1, index), columns)
    near = seen & (column_at[:, None, :] > at[..., None] - sliding)
    return full, torch.where(padding, first, near)[:, None]


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
