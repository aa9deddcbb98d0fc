"""Attention whose result for a row does not depend on other rows, columns and sequences.

Heads that share keys are packed into rows, so no keys are copied (transformers repeats all keys and values
for each group of heads in a masked step of more than one row).

A row attends to the same keys in a tree and in plain decoding, but in other columns. Two rules make its
result the same to the last bit:

- The columns far before a row, 0 .. ``_far(position) - 1``, contain the same keys in both. torch's flash
  kernel computes them; with a multiple of 4 rows, its bits for a row depend only on those columns.
- The nearer columns, some of which a tree masks, are weighted and summed in float64, and only the result is
  rounded to the model's dtype. The order of summation then affects about one of 10^8 results in float32,
  and hardly any in bfloat16.

The two are merged through the logarithm of the far part's sum of exponentials.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from outpace.core import UnsupportedModel

EXACT = "outpace_exact"

_BLOCK = 128  # the number of far columns is a multiple of this
_DEEPEST = 64  # maximum depth of a tree's nodes below its first row
_ROWS = 4  # a row's bits are the same in any multiple of this number of rows
_COLUMNS = 16  # and with at least this number of columns


class _Part(NamedTuple):
    """Rows that have the same far columns.

    Attributes:
        slots: their sequences.
        rows: their rows in each of these; None for all.
        far: number of far columns.
        bias: 0 if a row attends to a column from ``far`` on, otherwise -inf: [slots, 1, rows, columns].
    """

    slots: slice
    rows: Tensor | None
    far: int
    bias: Tensor | None


def _far(position: int) -> int:
    """Number of far columns of the row at a position."""
    return max(position - _DEEPEST, 0) // _BLOCK * _BLOCK


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
    heads, kv = query.shape[1], key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = _parts(attention_mask, query, key, heads // kv)
    if len(parts) == 1 and parts[0].rows is None:
        return _attend(query, key, value, parts[0], scale).transpose(1, 2).contiguous(), None
    result = query.new_zeros((*query.shape[:3], value.shape[-1]))
    for part in parts:
        some = query[part.slots] if part.rows is None else query[part.slots, :, part.rows]
        found = _attend(some, key[part.slots], value[part.slots], part, scale)
        if part.rows is None:
            result[part.slots] = found
        else:
            result[part.slots, :, part.rows] = found
    return result.transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, part: _Part, scale: float) -> Tensor:
    """Attention of one part: [b, heads, n, size]."""
    slots, heads, count, _ = query.shape
    kv, far = key.shape[1], part.far
    # Heads that share keys become rows: [b, kv, heads / kv * n, size], padded.
    rows = query.reshape(slots, kv, heads // kv * count, -1)
    own = rows.shape[2]
    if own % _ROWS:
        rows = nn.functional.pad(rows, (0, 0, 0, -own % _ROWS))
    close, near = key[:, :, far:].float(), value[:, :, far:].double()
    missing = max(_COLUMNS - close.shape[2], 0)  # at the beginning of a text
    if missing:
        close = nn.functional.pad(close, (0, 0, 0, missing))
    scores = torch.matmul(rows.float() * scale, close.transpose(2, 3))
    if missing:
        scores = scores[..., :-missing]
    if part.bias is not None:
        scores += part.bias
    if far:
        early, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, key[:, :, :far], value[:, :, :far], scale=scale
        )
        weights = torch.cat([logarithm[..., None], scores], dim=-1).softmax(dim=-1, dtype=torch.float64)
        result = torch.matmul(weights[..., 1:], near)
        result += weights[..., :1] * early
    else:
        result = torch.matmul(scores.softmax(dim=-1, dtype=torch.float64), near)
    return result[:, :, :own].to(query.dtype).reshape(slots, heads, count, -1)


def _parts(mask: Tensor | None, query: Tensor, key: Tensor, groups: int) -> list[_Part]:
    """The parts of a forward; they are stored with the mask, for all layers that share it."""
    width, columns = query.shape[2], key.shape[2]
    if mask is None and width == 1:
        return [_Part(slice(None), None, _far(columns - 1), None)]
    if mask is None:  # the first rows of a text
        mask = torch.ones((1, 1, width, columns), dtype=torch.bool).tril(columns - width)
        return _split(mask.expand(len(query), -1, -1, -1), groups)
    kept: list[_Part] | None = getattr(mask, "_outpace_parts", None)
    if kept is None:
        kept = _split(mask.expand(len(query), -1, -1, -1), groups)
        vars(mask)["_outpace_parts"] = kept
    return kept


def _split(mask: Tensor, groups: int) -> list[_Part]:
    """Group rows by their far columns. ``mask``: [B, 1, width, columns], boolean."""
    seen = mask[:, 0].sum(dim=-1)
    # Number of columns before the first that a row does not attend to.
    whole = torch.where(mask[:, 0].all(dim=-1), mask.shape[-1], mask[:, 0].to(torch.uint8).argmin(dim=-1))
    far = [
        [_far(count - 1) if _far(count - 1) <= first else 0 for count, first in zip(*both, strict=True)]
        for both in zip(seen.tolist(), whole.tolist(), strict=True)
    ]
    if not any(map(any, far)):
        return [_Part(slice(None), None, 0, _bias(mask, groups))]
    parts = []
    for slot, lengths in enumerate(far):
        own = slice(slot, slot + 1)
        for length in sorted(set(lengths)):
            rows = torch.tensor([row for row, one in enumerate(lengths) if one == length])
            bias = _bias(mask[own, :, rows, length:], groups)
            parts.append(_Part(own, None if len(rows) == len(lengths) else rows, length, bias))
    return parts


def _bias(mask: Tensor, groups: int) -> Tensor:
    """Convert a mask [b, 1, n, columns] to a bias [b, 1, groups * n + padding, columns] of scores."""
    bias = torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    bias = bias.repeat(1, 1, groups, 1)
    return nn.functional.pad(bias, (0, 0, 0, -bias.shape[2] % _ROWS))


AttentionInterface.register(EXACT, exact_attention)
AttentionMaskInterface.register(EXACT, sdpa_mask)
