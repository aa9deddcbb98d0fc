"""Attention over committed columns and a tree, described by compact masks (``device_rows.compact``).

No mask over columns is made: a row has the column where its tree begins, the first one before it that it
attends to, and a bit mask of nodes. These are read on the device, so one graph serves every length. Supports
grouped queries, sliding windows, soft caps and sinks.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from outpace.core import UnsupportedModel
from outpace.native.gpu import why_no_triton
from outpace.targets.inputs.device_rows import WORD
from outpace.targets.inputs.masks import TREE
from outpace.targets.inputs.surgery import exchange

_log = logging.getLogger(__name__)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' ``AttentionInterface``.

    Args:
        query: [B, heads, width, size].
        key: [B, heads that share keys, columns, size].
        value: [B, heads that share keys, columns, size of values].
        attention_mask: compact, [B, 1, width, 2 + words]; or in sdpa's form, if a model makes its own.
        softcap: scores go through ``softcap * tanh(score / softcap)``.
        s_aux: sinks, a score for each head that takes its share and adds nothing.

    Returns:
        [B, width, heads, size of values], and no weights.

    Raises:
        UnsupportedModel: the model needs other features.
    """
    if dropout or kwargs.get("position_bias") is not None:
        raise UnsupportedModel(f"attention with {'dropout' if dropout else 'a bias'} cannot be replaced")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows, columns = query.shape[2], key.shape[2]
    if attention_mask is None:
        seen = torch.ones((1, 1, rows, columns), dtype=torch.bool, device=query.device)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        seen = seen.tril(columns - rows) if causal else seen
    elif attention_mask.dtype == torch.bool:
        seen = attention_mask
    elif query.device.type == "cuda" and query.dtype != torch.float64 and not why_no_triton():
        from triton.runtime.errors import OutOfResources

        from outpace.targets.gpu.tree_kernel import tree_attention as run

        try:
            return run(query, key, value, attention_mask, scale, softcap, s_aux), None
        except OutOfResources as error:
            _warn_of_refusal(str(error))
        seen = visible(attention_mask, columns)
    else:
        seen = visible(attention_mask, columns)
    return reference(query, key, value, seen, scale, softcap, s_aux), None


@cache
def _warn_of_refusal(reason: str) -> None:
    """Warn of a kernel that a GPU cannot run, once for each reason."""
    _log.warning("attention over trees runs on torch's operations, which is slower: %s", reason)


def visible(mask: Tensor, columns: int) -> Tensor:
    """Convert a compact mask to a boolean one, [B, 1, width, columns]."""
    base, low, words = mask[..., :1], mask[..., 1:2], mask[..., 2:]
    column = torch.arange(columns, device=mask.device)
    node = (column - base).clamp(min=0)
    inside = (column >= base) & (node < WORD * words.shape[-1])
    word = words.gather(-1, (node // WORD).clamp(max=words.shape[-1] - 1))
    bit = (word >> (node % WORD)) & 1
    return ((column >= low) & (column < base)) | (inside & (bit == 1))


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``tree_attention`` in torch operations. Rows that attend to no column get finite values.

    Args:
        seen: the columns that each row attends to, boolean [B, 1, width, columns].
    """
    batch, heads, width, size = query.shape
    kv, columns = key.shape[1:3]
    rows = query.reshape(batch, kv, heads // kv * width, size)
    scores = torch.matmul(rows, key.transpose(2, 3)).unflatten(2, (-1, width)) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink_scores = sinks.view(kv, -1, 1, 1).expand(batch, -1, -1, width, 1)
        scores = torch.cat([scores, sink_scores.to(scores.dtype)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :columns].to(value.dtype)
    result: Tensor = torch.matmul(weights.flatten(2, 3), value).unflatten(2, (-1, width))
    return result.flatten(1, 2).transpose(1, 2).contiguous()


def with_trees(model: Any) -> Any:
    """A copy of a model that runs on ``tree_attention``, with the same weights."""
    return exchange(model, lambda _: None, TREE)


AttentionInterface.register(TREE, tree_attention)
AttentionMaskInterface.register(TREE, sdpa_mask)
