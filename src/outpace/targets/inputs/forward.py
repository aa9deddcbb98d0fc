"""Inputs and outputs of a transformers model's forward over a window of a cache, and the cache object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache as ModelCache

from outpace.cache import FixedRows, Slot, Window
from outpace.targets.batch import Batch
from outpace.targets.inputs.context import ForwardContext
from outpace.targets.rows import Output, Rows
from outpace.tree import depths

_NOTHING = Rows(())


class CacheAdapter(ModelCache):
    """A window of a KVCache as transformers' cache.

    Args:
        cache_layers: layer of the model -> layer of the cache. (Layers that share another's keys have no
            entry.)

    Attributes:
        context: what the layers of one forward have in common.
    """

    def __init__(self, window: Window | FixedRows, cache_layers: dict[int, int]) -> None:
        super().__init__(layers=[])
        self.window = window
        self.context = ForwardContext()
        self._cache_layers = cache_layers
        self._columns = window.columns
        self._width = window.width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.window.append(self._cache_layers[layer_idx], key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._columns - self._width

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        return self._columns, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    # The name of get_max_length before transformers 5.23.
    get_max_cache_shape = get_max_length

    @property
    def is_initialized(self) -> bool:
        return True


def embeddings_of(part: Any) -> Any:
    """The table of the tokens of an encoder or a decoder, which FSMT's lack a method for."""
    return part.get_input_embeddings() if hasattr(part, "get_input_embeddings") else part.embed_tokens


def device_of(embeddings: Any) -> torch.device:
    """Device of a model's inputs."""
    device: torch.device = embeddings.weight.device
    if device.type == "meta":  # offloaded: accelerate's hook brings the weights to this device
        device = torch.device(embeddings._hf_hook.execution_device)
    return device


def rows_of(window: Window, feeds: Mapping[Slot, Rows]) -> list[Rows]:
    """Rows of a window's slots, in its order; empty for those that feed none in it."""
    fed = zip(window.slots, window.widths, strict=True)
    return [feeds[slot] if slot is not None and width else _NOTHING for slot, width in fed]


def inputs_of(rows: Sequence[Rows], window: Window) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and positions of a window's rows, each [B][width]."""
    tokens = [[*row.tokens, *[0] * (window.width - len(row.tokens))] for row in rows]
    positions = [
        positions_of(row, offset, window.width) for row, offset in zip(rows, window.offsets, strict=True)
    ]
    return tokens, positions


def padded_states(window: Window, states: Mapping[Slot, Tensor]) -> Tensor:
    """Rows of slots, [n, size], as one tensor [B, width, size] in the window's order, padded with zeros."""
    some = next(iter(states.values()))
    padded = some.new_zeros((len(window.slots), window.width, some.shape[-1]))
    for sequence, slot in enumerate(window.slots):
        if slot is not None and slot in states:
            padded[sequence, : len(states[slot])] = states[slot]
    return padded


def positions_of(row: Rows, offset: int, width: int) -> list[int]:
    """Position of each row: committed length + depth. Padding repeats the last one, a legal position."""
    size, fed = len(row.tokens), len(row.fed)
    ahead = range(size) if row.parents is None else depths(row.tree)[fed:]
    positions = [offset - fed + depth for depth in ahead]
    return positions + [positions[-1] if positions else 0] * (width - size)


def laid_out(
    slots: Sequence[Slot | None],
    batch: Batch,
    logits: Tensor | None,
    first: int,
    hidden: Mapping[int, Tensor],
    bare: bool = False,
) -> Output:
    """Outputs of a padded forward, [B, ...], in the order of ``slots``, some of which fed no rows.

    Args:
        logits: [B, width - first, vocabulary], or None.
        first: the first row of each sequence that has logits.
        hidden: layer -> [B, width, hidden size].
        bare: the logits are hidden states.
    """
    fed = [(index, slot) for index, slot in enumerate(slots) if slot is not None and slot in batch.rows]
    states = {slot: {layer: rows[index] for layer, rows in hidden.items()} for index, slot in fed}
    if logits is None:
        return Output(None, {}, states if hidden else {})
    width = logits.shape[1]
    spans: dict[Slot, slice] = {}
    places: list[NDArray[np.int64]] = []
    end = 0
    for index, slot in fed:
        rows = batch.reads[slot]
        places.append(rows.astype(np.int64) + (index * width - first))
        spans[slot] = slice(end, end := end + len(rows))
    read = _picked(logits.flatten(0, 1), places)
    return Output(read if bare else drawn_from(read), spans, states if hidden else {})


def drawn_from(logits: Tensor) -> Tensor:
    """Logits where draws can be made, in float64, which MPS lacks."""
    return logits.cpu() if logits.device.type == "mps" else logits


def _picked(rows: Tensor, places: Sequence[NDArray[np.int64]]) -> Tensor:
    """Some rows of a table; a part of it without a copy if they follow each other."""
    wanted = np.concatenate(places) if places else np.empty(0, dtype=np.int64)
    gaps = np.flatnonzero(np.diff(wanted) != 1) + 1
    runs = [rows[int(run[0]) : int(run[-1]) + 1] for run in np.split(wanted, gaps) if len(run)]
    return runs[0] if len(runs) == 1 else torch.cat(runs) if runs else rows[:0]
