"""Committed rows of a generate() call as transformers' caches."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from outpace.hf.engines import Kept, LayerRows


def filled(
    cache: Any, kept: Seq[Kept], pads: Seq[int], columns: int, seen: Tensor | None, model: Any
) -> DynamicCache | EncoderDecoderCache:
    """A cache of the committed rows, [rows, heads, columns, size]: zeros at pads and after the end.

    Args:
        cache: empty; filled in place where it is a plain DynamicCache.
        kept: per row of the batch.
        pads: number of pads before each row.
        columns: length of the prompt with pads and the output, minus the last token, which was never fed.
        seen: the columns of the encoder's output that each row attends to, boolean [rows, length]; None for
            a decoder-only model.
    """
    ends = [min(columns, front + row.own[0][0].shape[2]) for front, row in zip(pads, kept, strict=True)]
    places = [torch.arange(front, end) for front, end in zip(pads, ends, strict=True)]
    rows = [row.own for row in kept]
    if seen is None:
        return _filled(cache, rows, places, columns, model)
    made = cache if isinstance(cache, EncoderDecoderCache) else EncoderDecoderCache(cache, DynamicCache())
    made.self_attention_cache = _filled(made.self_attention_cache, rows, places, columns, model)
    made.cross_attention_cache = _filled(
        made.cross_attention_cache,
        [row.cross for row in kept],
        [row.nonzero()[:, 0] for row in seen],
        seen.shape[1],
        model,
    )
    made.is_updated = dict.fromkeys(range(len(kept[0].cross)), True)
    return made


def _filled(
    cache: Any, kept: Seq[Seq[LayerRows]], places: Seq[Tensor], columns: int, model: Any
) -> DynamicCache:
    plain = type(cache) is DynamicCache and not getattr(cache, "offloading", False)
    made = cache if plain else DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer in range(len(kept[0])):
        states = []
        for which in (0, 1):
            _, heads, _, size = kept[0][layer][which].shape
            state = kept[0][layer][which].new_zeros((len(kept), heads, columns, size))
            for row, (at, layers) in enumerate(zip(places, kept, strict=True)):
                state[row][:, at.to(state.device)] = layers[layer][which][0, :, : len(at)]
            states.append(state)
        made.update(states[0], states[1], layer)
    return made
