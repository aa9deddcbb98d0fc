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

    Attributes:
        by_kind: whether the model takes a dict. Some list ``layer_types`` and take none; the target tries.

    Raises:
        UnsupportedModel: attention of a kind, or an implementation of it, that no tree mask is known for.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
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
        window = getattr(config, "sliding_window", None) or None  # some say 0 for none
        self._sliding: int | None = window if not self._kinds or _SLIDING in self._kinds else None

    @property
    def kinds(self) -> int:
        """Kinds of masks the layers need: a model that takes no dict can have only one."""
        return max(len(self._kinds), 1)

    def one(self, device: torch.device) -> Mask:
        """The mask of a single token that sees itself."""
        seen = np.ones((1, 1, 1, 1), dtype=np.bool_)
        return self._form(seen, seen, device)

    def given(self, seen: Tensor, positions: Tensor) -> Mask:
        """The mask of a forward without a cache. ``seen``: [B, N, N]; ``positions``: of each row, [B, N]."""
        near = seen
        if self._sliding is not None:
            near = seen & (positions[:, None, :] > positions[:, :, None] - self._sliding)
        full, sliding = (mask[:, None].cpu().numpy() for mask in (seen, near))
        return self._form(full, full if self._sliding is None else sliding, seen.device)

    def __call__(
        self, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]], device: torch.device
    ) -> Mask:
        """The mask or masks of a forward. ``positions``: of each row, [B][width]."""
        if self._is_plain(rows, window):
            return dict.fromkeys(self._kinds) if self.by_kind else None
        full = _tree_masks(rows, window)
        if self._sliding is None:
            return self._form(full, full, device)
        return self._form(full, _cut(full, rows, window, np.asarray(positions), self._sliding), device)

    def _is_plain(self, rows: Sequence[Rows], window: Window) -> bool:
        """Whether the model's own causal mask will do: no mask lets sdpa pick its fastest kernels.

        That is one row for each sequence, all of one length; or, on sdpa, which takes no mask for a causal
        one, the first rows of a text.
        """
        if window.span is None or (self._sliding is not None and window.columns > self._sliding):
            return False
        chains = all(row.parents is None or is_chain(row.tree) for row in rows)
        return chains and (window.width == 1 or (window.span.start == 0 and not self._additive))

    def _form(self, full: NDArray[np.bool_], sliding: NDArray[np.bool_], device: torch.device) -> Mask:
        if not self.by_kind:
            return self._tensor(full if self._sliding is None else sliding, device)
        masks = {kind: sliding if kind == _SLIDING else full for kind in self._kinds}
        # Below the window both are one array: one tensor will do.
        distinct = {id(mask): mask for mask in masks.values()}
        tensors = {key: self._tensor(mask, device) for key, mask in distinct.items()}
        return {kind: tensors[id(mask)] for kind, mask in masks.items()}

    def _tensor(self, mask: NDArray[np.bool_], device: torch.device) -> Tensor:
        seen = torch.from_numpy(mask).to(device)
        if not self._additive:
            return seen
        shut = torch.finfo(self._dtype).min
        return torch.zeros(seen.shape, dtype=self._dtype, device=device).masked_fill_(~seen, shut)


def _additive(config: Any) -> bool:
    """Whether the attention of a model adds its mask.

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


def _tree_masks(rows: Sequence[Rows], window: Window) -> NDArray[np.bool_]:
    """[B, 1, width, columns]: a row sees the committed rows and its ancestors; padding sees one row."""
    mask = np.zeros((len(rows), 1, window.width, window.columns), dtype=np.bool_)
    for place, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        base = offset - fed
        mask[place, 0, :size, :base] = True
        tree = chain_mask(size) if row.parents is None else ancestor_mask(row.tree)[fed:]
        mask[place, 0, :size, base : offset + size] = tree
        mask[place, 0, size:, 0] = True
    return mask


def _cut(
    full: NDArray[np.bool_],
    rows: Sequence[Rows],
    window: Window,
    positions: NDArray[np.int64],
    sliding: int,
) -> NDArray[np.bool_]:
    """The mask without columns whose position is ``sliding`` or more before the row's own."""
    if positions.max() < sliding:
        return full
    mask = full.copy()
    columns = column_positions(rows, window, positions)
    for place, row in enumerate(rows):
        size = len(row.tokens)
        near = columns[place, None, :] > positions[place, :size, None] - sliding
        mask[place, 0, :size] &= near
    return mask


def column_positions(rows: Sequence[Rows], window: Window, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, columns]: a committed row's column is its position; a tree's column has its node's position."""
    columns = np.tile(np.arange(window.columns), (len(rows), 1))
    for place, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        if fed:
            columns[place, offset - fed : offset] = [offset - fed + depth for depth in depths(row.fed)]
        columns[place, offset : offset + size] = positions[place, :size]
    return columns
