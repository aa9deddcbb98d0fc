"""Attention of flat forwards: rows of all sequences one after the other, [1, N, ...].

Products, norms and mixtures compute each row by itself. So they are given a batch's rows as they lie: weights
are read once for prompts and steps together, and no padding is computed. Only attention is computed per
window of the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outpace.cache import Window
from outpace.core import UnsupportedModel
from outpace.targets.batch import Batch
from outpace.targets.cpu.exact_attention import EXACT
from outpace.targets.inputs.context import forward_context
from outpace.targets.inputs.forward import CacheAdapter
from outpace.targets.inputs.masks import Mask

# Implementation of attention -> that of flat forwards, which calls it for each window.
FLAT = {"sdpa": "outpace_flat_sdpa", "eager": "outpace_flat_eager", EXACT: "outpace_flat_exact"}


@dataclass(frozen=True)
class FlatWindow:
    """The rows of a flat forward that a window of the cache has.

    Attributes:
        rows: their numbers, [B, width]; padding repeats a row.
        real: which of B * width are no padding.
        mask: as the window's own forward would have it.
    """

    window: Window
    rows: Tensor
    real: Tensor
    mask: Mask

    @classmethod
    def of(cls, window: Window, batch: Batch, mask: Mask) -> FlatWindow:
        starts = dict(zip(batch.slots, batch.starts.tolist(), strict=False))
        begin = np.array([starts.get(slot, 0) if slot is not None else 0 for slot in window.slots])
        widths, order = np.array(window.widths)[:, None], np.arange(window.width)
        rows = begin[:, None] + np.minimum(order, np.maximum(widths - 1, 0))
        real = np.flatnonzero(order < widths)
        return cls(window, torch.from_numpy(rows), torch.from_numpy(real), mask)


class FlatCache(CacheAdapter):
    """The windows of a flat forward as transformers' cache.

    Args:
        kinds: of layers, by which the model takes masks; None if it takes one for all.

    Attributes:
        mask: what the model is given as its masks: tensors by which attention finds those of a layer's kind.

    Raises:
        UnsupportedModel: by a forward whose layers attend by code of their own.
    """

    def __init__(
        self, parts: Sequence[FlatWindow], cache_layers: dict[int, int], kinds: Sequence[str] | None
    ) -> None:
        super().__init__(parts[0].window, cache_layers)
        self.context.flat = self
        self._parts = parts
        # The layer whose rows the next attention is given, and these.
        self._latest: tuple[int, Tensor, Tensor] | None = None
        self._named: dict[str, Tensor | None] = {kind: _token() for kind in kinds or ("",)}
        self.mask: Mask = self._named[""] if kinds is None else self._named

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.check_attended()
        self._latest = self._cache_layers[layer_idx], key_states, value_states
        return key_states, value_states

    def check_attended(self) -> None:
        """Refuse a model that has not attended to the rows of its latest layer here."""
        if self._latest is not None:
            raise UnsupportedModel("its attention is code of its own")

    def attend(
        self,
        attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        given: Tensor | None,
    ) -> Tensor:
        """Attention of a layer, [1, N, heads, size]; tensors of rows are [1, heads, N, size]."""
        latest, self._latest = self._latest, None
        kind = next((kind for kind, tensor in self._named.items() if tensor is given), None)
        if latest is None or latest[1] is not key or latest[2] is not value or kind is None:
            raise UnsupportedModel("its layers share keys, or change what the cache or the mask has")
        made = []
        for part in self._parts:
            rows, keys, values = (tensor[0][:, part.rows].transpose(0, 1) for tensor in (query, key, value))
            mask = part.mask[kind] if isinstance(part.mask, dict) else part.mask
            found = attention(rows, *part.window.append(latest[0], keys, values), mask)
            made.append(found.flatten(0, 1)[part.real])
        out = made[0].new_zeros((query.shape[2], *made[0].shape[1:]))
        for part, rows in zip(self._parts, made, strict=True):
            out[part.rows.flatten()[part.real]] = rows
        return out[None]


def _token() -> Tensor:
    return torch.ones((1, 1, 1, 1), dtype=torch.bool)


def _flat_attention(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' ``AttentionInterface``; ``name``: of that for each window."""
    # A family's eager attention is in its own file.
    own = vars(sys.modules[type(module).__module__]).get(f"{name}_attention_forward")
    function = ALL_ATTENTION_FUNCTIONS.get(name, own)
    if function is None:
        raise UnsupportedModel("its attention is code of its own")
    flat: FlatCache | None = forward_context().flat
    if flat is None:
        return function(module, query, key, value, attention_mask, **kwargs)[0], None

    def attention(rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        made: Tensor = function(module, rows, keys, values, mask, **kwargs)[0]
        return made

    return flat.attend(attention, query, key, value, attention_mask), None


for _inner, _name in FLAT.items():
    AttentionInterface.register(_name, partial(_flat_attention, _inner))
    AttentionMaskInterface.register(_name, eager_mask if _inner == "eager" else sdpa_mask)
