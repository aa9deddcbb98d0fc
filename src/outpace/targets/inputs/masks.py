"""Attention masks over committed rows and a tree, in the forms that transformers' models accept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import Window
from outpace.core import UnsupportedModel
from outpace.targets.inputs.device_rows import Trees, compact, dense, in_order, to_device
from outpace.targets.rows import Rows
from outpace.tree import ancestor_mask, chain_mask, depths, is_chain

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_STATES = ("linear_attention", "conv")  # layers that keep a state, whose mask would tell pads
_ROWS = ("mlp", "moe")  # and those without attention or state, of Nemotron
_BOTH = "hybrid"  # and those that have attention beside it

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
        states: some layers keep a state.

    Attributes:
        by_kind: the model accepts a dict. Some list ``layer_types`` but do not; the target tests it.

    Raises:
        UnsupportedModel: no tree mask is known for the implementation of attention.
    """

    def __init__(self, config: Any, dtype: torch.dtype, states: bool = False) -> None:
        self._dtype = dtype
        self._encode = {TREE: compact, INVARIANT: in_order}.get(config._attn_implementation)
        self._additive = self._encode is None and _additive(config)
        kinds = set(getattr(config, "layer_types", None) or ())
        if states:  # models read their masks by these, whatever their config calls the layers
            kinds |= {_FULL, *_STATES}
        self._kinds = sorted(kinds)
        self._ends: tuple[int, int] | None = None
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
        shown = copy.copy(self)
        shown._ends = sinks, recent
        return shown

    @property
    def kinds_by_name(self) -> list[str] | None:
        """The kinds of layers that a model's masks are by; None if it takes one mask."""
        return self._kinds if self.by_kind else None

    @property
    def kinds(self) -> int:
        """Number of kinds of masks that the layers need; a model without a dict can have only one."""
        return max(len(self._kinds), 1)

    def token_mask(self, device: torch.device) -> Mask:
        """The mask of a single token that attends to itself."""
        seen = torch.ones((1, 1, 1), dtype=torch.bool, device=device)
        return self.whole_mask(seen, torch.zeros((1, 1), dtype=torch.long, device=device))

    def whole_mask(self, seen: Tensor, positions: Tensor) -> Mask:
        """The mask of a forward without a cache. ``seen``: [B, N, N]; ``positions`` of the rows: [B, N]."""
        base, real = torch.zeros_like(positions[:, :1]), torch.ones_like(positions, dtype=torch.bool)
        return self.tree_mask(Trees(base, real, seen, positions, positions), seen.shape[2])

    def tree_mask(self, trees: Trees, columns: int) -> Mask:
        """The mask or masks of a forward whose rows are on the device."""
        if self._encode is not None:
            return self._form(*self._encode(trees, self._sliding))
        return self._form(*dense(trees, columns, self._sliding))

    def __call__(
        self, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]], device: torch.device
    ) -> Mask:
        """The mask or masks of a forward. ``positions`` of the rows: [B][width]."""
        if self._ends is not None and max(window.offsets) > sum(self._ends):
            made = tree_masks(rows, window, positions, self._sliding)
            for mask in made:
                hide(mask, window.offsets, *self._ends)
            return self._form(*(mask.to(device) for mask in made))
        if self._encode is not None or (device.type != "cpu" and not self._is_plain(rows, window)):
            return self.tree_mask(to_device(rows, window, device).trees, window.columns)
        if self._is_plain(rows, window):
            return dict.fromkeys(self._kinds) if self.by_kind else None
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
        return {kind: None if kind in _STATES + _ROWS else tensors[id(mask)] for kind, mask in masks.items()}

    def _tensor(self, seen: Tensor) -> Tensor:
        """Convert a mask to the attention's form."""
        if not self._additive:
            return seen
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self._dtype).min)


class NoMasks(MaskMaker):
    """Leaves the mask to the model: for chains of one sequence at a time, without padding."""

    def __init__(self) -> None:
        self.by_kind = False
        self._kinds = []

    def over_window(self, sinks: int, recent: int) -> MaskMaker:
        raise UnsupportedModel(
            "this target takes chains only, with the model's own mask, which cannot hide a part of the "
            "committed rows; use another drafter"
        )

    def token_mask(self, device: torch.device) -> Mask:
        return None

    def tree_mask(self, trees: Trees, columns: int) -> Mask:
        raise UnsupportedModel(
            "this target takes chains only, with the model's own mask, so it cannot be trained through; use "
            "a drafter without trained parts"
        )

    def __call__(
        self, rows: Sequence[Rows], window: Window, positions: Sequence[Sequence[int]], device: torch.device
    ) -> Mask:
        return None


def unknown_kinds(config: Any, states: bool = False) -> list[str]:
    """The kinds of layers in a config whose masks are not known here.

    Args:
        states: those that keep a state are known.
    """
    kinds = getattr(config, "layer_types", None) or ()
    return sorted(set(kinds) - {_FULL, _SLIDING} - ({*_STATES, *_ROWS, _BOTH} if states else set()))


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
    for sequence, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        base = offset - fed
        mask[sequence, 0, :size, :base] = True
        mask[sequence, 0, :size, base : offset + size] = _ancestors(row)
        mask[sequence, 0, size:, 0] = True
    full = torch.from_numpy(mask)
    at = np.asarray(positions)
    if sliding is None or at.max() < sliding:
        return full, full
    near = mask.copy()
    columns = column_positions(rows, window, at)
    for sequence, row in enumerate(rows):
        size = len(row.tokens)
        near[sequence, 0, :size] &= columns[sequence, None, :] > at[sequence, :size, None] - sliding
    return full, torch.from_numpy(near)


def hide(mask: Tensor, offsets: Sequence[int], sinks: int, recent: int) -> None:
    """Hide the committed rows after the first ones and before the most recent ones, in place."""
    for rows, offset in zip(mask, offsets, strict=True):
        rows[..., sinks : max(offset - recent, sinks)] = False


def _ancestors(row: Rows) -> NDArray[np.bool_]:
    """The nodes of the tree that each row attends to, boolean [rows fed now, rows of the tree]."""
    return chain_mask(len(row.tokens)) if row.parents is None else ancestor_mask(row.tree)[len(row.fed) :]


def column_positions(rows: Sequence[Rows], window: Window, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of the columns, [B, columns]: the index of a committed row, the position of a tree's node."""
    columns = np.tile(np.arange(window.columns), (len(rows), 1))
    for sequence, (row, offset) in enumerate(zip(rows, window.offsets, strict=True)):
        size, fed = len(row.tokens), len(row.fed)
        if fed:
            columns[sequence, offset - fed : offset] = [offset - fed + depth for depth in depths(row.fed)]
        columns[sequence, offset : offset + size] = positions[sequence, :size]
    return columns
