"""Attention whose result for a row does not depend on other rows, columns and sequences.

The compiled function of native steps (``compiled_attention.py``) computes it. Where nothing can be compiled,
scores, weights and sums are in float64, and only the result is rounded to the model's dtype: a row attends to
the same keys in a tree and in plain decoding, but in other columns, and the order of such sums changes about
one of 10^8 results in float32, and hardly any in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from outpace.core import UnsupportedModel
from outpace.targets.cpu.compiled_attention import compiled_attention, compiled_takes

EXACT = "outpace_exact"
_ROOM = 1 << 24  # scores that are in memory at once, about


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' ``AttentionInterface``; its mask has the form of sdpa's.

    Args:
        query: [B, heads, width, size].
        key, value: [B, heads that share keys, columns, size].

    Returns:
        [B, width, heads, size], and no weights.

    Raises:
        UnsupportedModel: the model needs more than scaled dot products: a soft cap, sinks, a bias.
    """
    more = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if more or dropout:
        raise UnsupportedModel(f"attention with {', '.join(more) or 'dropout'} has no bit-exact form here")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if compiled_takes(query, key, value):
        return compiled_attention(query, key, value, attention_mask, scale), None
    width, columns = query.shape[2], key.shape[2]
    if attention_mask is None:
        attention_mask = torch.ones((1, 1, width, columns), dtype=torch.bool).tril(columns - width)
    most = max(1, _ROOM // (len(query) * query.shape[1] * columns))
    parts = zip(query.split(most, dim=2), attention_mask.split(most, dim=2), strict=True)
    return torch.cat([_attend(rows, key, value, mask, scale) for rows, mask in parts], dim=1), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention in float64 of some rows; ``mask``: [1 or B, 1, width, columns], boolean."""
    heads = query.shape[1] // key.shape[1]
    # A dimension of the heads that share keys, over which keys and values are broadcast without a copy.
    rows = query.unflatten(1, (-1, heads)).double() * scale
    near, values = (tensor.double()[:, :, None] for tensor in (key, value))
    scores = (rows @ near.mT).masked_fill_(~mask[:, :, None], -torch.inf)
    result: Tensor = scores.softmax(dim=-1) @ values
    return result.to(query.dtype).flatten(1, 2).transpose(1, 2).contiguous()


AttentionInterface.register(EXACT, exact_attention)
AttentionMaskInterface.register(EXACT, sdpa_mask)
