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
from outpace.tree import ancestor_mask, chain_mask

_FULL = "full_attention"
_SLIDING = "sliding_attention"


class MaskMaker:
    """Masks [B, 1, width, columns] for one model.

    Boolean where attention runs on sdpa, additive where it is eager (there a boolean mask would be *added*).
    A model whose config lists ``layer_types`` gets a dict with one mask per kind; else a ``sliding_window`` in
    the config is cut from the one mask.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._additive = _additive(config)
        kinds = getattr(config, "layer_types", None)
        self._kinds = sorted(set(kinds)) if kinds else None
        unknown = set(self._kinds or ()) - {_FULL, _SLIDING}
        if unknown:
            raise UnsupportedModel(
                f"{config.model_type} has attention layers of kind {', '.join(sorted(unknown))}, whose mask is not "
                "known here, or whose rows see more than their ancestors"
            )
        window = getattr(config, "sliding_window", None)
        uses = self._kinds is None or _SLIDING in self._kinds
        self._sliding: int | None = window if uses else None

    def one(self, device: torch.device) -> Tensor | dict[str, Tensor]:
        """The mask of a single token that sees itself."""
        seen = np.ones((1, 1, 1, 1), dtype=np.bool_)
        return self._form({_FULL: seen, _SLIDING: seen}, device)

    def __call__(
        self, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]], device: torch.device
    ) -> Tensor | dict[str, Tensor]:
        """The mask or masks of a forward. ``positions``: of each row, [B][width]."""
        full = _tree_masks(rows, window)
        masks = {_FULL: full}
        if self._sliding is not None:
            masks[_SLIDING] = _cut(full, rows, window, np.asarray(positions), self._sliding)
        return self._form(masks, device)

    def _form(self, masks: dict[str, NDArray[np.bool_]], device: torch.device) -> Tensor | dict[str, Tensor]:
        if self._kinds is None:
            return self._tensor(masks[_FULL if self._sliding is None else _SLIDING], device)
        return {kind: self._tensor(masks[kind], device) for kind in self._kinds}

    def _tensor(self, mask: NDArray[np.bool_], device: torch.device) -> Tensor:
        seen = torch.from_numpy(mask).to(device)
        if not self._additive:
            return seen
        shut = torch.finfo(self._dtype).min
        return torch.zeros(seen.shape, dtype=self._dtype, device=device).masked_fill(~seen, shut)


def _additive(config: Any) -> bool:
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
        f"attn_implementation={implementation!r} takes no tree mask; load the model with 'sdpa' or 'eager'"
    )


def _tree_masks(rows: Sequence[Rows], window: Window) -> NDArray[np.bool_]:
    """[B, 1, width, columns]: a row sees the committed rows and its ancestors; padding sees one real row."""
    mask = np.zeros((len(rows), 1, window.width, window.columns), dtype=np.bool_)
    for place, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size = len(row.tokens)
        mask[place, 0, :size, :offset] = True
        tree = chain_mask(size) if row.parents is None else ancestor_mask(row.parents)
        mask[place, 0, :size, offset : offset + size] = tree
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
    if max(int(positions.max()) + 1, 1) <= sliding:
        return full
    mask = full.copy()
    for place, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size = len(row.tokens)
        if not size:
            continue
        # A committed row's column is its position; a tree's column has its node's position.
        columns = np.arange(window.columns)
        columns[offset : offset + size] = positions[place, :size]
        near = columns[None, :] > positions[place, :size, None] - sliding
        mask[place, 0, :size] &= near
    return mask
