"""Attention whose result for a row does not depend on other rows, columns and sequences.

Heads that share keys are packed into rows, so no keys are copied (transformers repeats all keys and values
for each group of heads in a masked step of more than one row).

The compiled function of native steps (``compiled_attention.py``) computes what it takes: float32 and
bfloat16, heads of a multiple of 32 numbers. The rest of this module is for what it does not take, and for
machines without it.

A row attends to the same keys in a tree and in plain decoding, but in other columns. Two rules make its
result the same to the last bit:

- The columns far before a row, 0 .. ``_far(position) - 1``, contain the same keys in both. torch's flash
  kernel computes them, with a multiple of 16 rows, if a trial shows that its bits for a row depend only on
  those columns. On an Intel with AVX2 alone they do not: all columns are near ones there, which takes longer.
- The nearer columns, some of which a tree masks, are scored, weighted and summed in float64, and only the
  result is rounded to the model's dtype. The order of summation then affects about one of 10^8 results in
  float32, and hardly any in bfloat16.

The two are merged through the logarithm of the far part's sum of exponentials.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from outpace.core import UnsupportedModel
from outpace.targets.cpu.compiled_attention import compiled_attention, compiled_takes
from outpace.targets.cpu.trials import using_threads
from outpace.targets.inputs.shared import shared_here

_log = logging.getLogger(__name__)
EXACT = "outpace_exact"

_BLOCK = 128  # the number of far columns is a multiple of this
_DEEPEST = 64  # maximum depth of a tree's nodes below its first row
_ROWS = 16  # the number of rows that the flash kernel is given is a multiple of this
_THREADS = (1, 3)  # in trials of the flash kernel
_ROOM = 1 << 24  # scores that are in memory at once, about


class _RowGroup(NamedTuple):
    """Rows that have the same far columns.

    Attributes:
        slots: their sequences.
        rows: their rows in each of these; None for all.
        far: number of far columns.
        bias: 0 if a row attends to a column from ``far`` on, otherwise -inf: [slots, 1, rows, columns].
        stop: no row attends to this column or a later one; None if one attends to the last.
    """

    slots: slice
    rows: Tensor | None
    far: int
    bias: Tensor | None
    stop: int | None = None


def _far(position: int) -> int:
    """Number of far columns of the row at a position."""
    return max(position - _DEEPEST, 0) // _BLOCK * _BLOCK


@lru_cache(maxsize=32)
def flash_is_exact(dtype: torch.dtype, size: int) -> bool:
    """True if torch's flash kernel gives a row the same bits in any multiple of ``_ROWS`` rows, by a trial.

    And with any number of threads.

    Args:
        size: of a head.
    """
    generator = torch.Generator().manual_seed(0)
    for columns in (_BLOCK, 5 * _BLOCK):
        query, key, value = (
            torch.randn(1, 1, count, size, generator=generator) for count in (832, columns, columns)
        )
        # All scores are 0 for other rows, and their values cancel, so that only the sums' rounding remains.
        order = torch.randperm(columns // 2, generator=generator)
        opposite = torch.cat([half := value[:, :, : columns // 2], -half[:, :, order]], dim=2)
        for rows, values in ((query, value), (query * 0, opposite)):
            inputs = rows.to(dtype), key.to(dtype), values.to(dtype)
            if not _even(inputs):
                _log.warning(
                    "torch's attention gives a row in %s other bits among other rows on this processor: "
                    "bit-exact steps compute it in float64, which takes longer; exact=False avoids it",
                    dtype,
                )
                return False
    return True


def _even(inputs: tuple[Tensor, Tensor, Tensor]) -> bool:
    """True if the flash kernel gives the first rows the same bits whatever their number."""
    rows, key, value = inputs

    def flash(part: Tensor) -> Tensor:
        result, logarithm = _flash(part.contiguous(), key, value, 1.0 / rows.shape[-1] ** 0.5)
        return torch.cat([result.float(), logarithm[..., None].float()], dim=-1)

    with using_threads(1):
        expected = torch.cat([flash(part) for part in rows.split(_ROWS, dim=2)], dim=2)
    for count in _THREADS:
        with using_threads(count):
            for end in (1, 2, 3, 5, 12, 14, 50, 52):
                if not torch.equal(flash(rows[:, :, : end * _ROWS]), expected[:, :, : end * _ROWS]):
                    return False
    return True


def _flash(rows: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of all rows to all columns, and the logarithms of the sums of the scores' exponentials."""
    count = len(rows)
    if count * rows.shape[1] == 1 and torch.get_num_threads() > 1:
        # Threads share the products of a single head, but not those of two.
        rows, key, value = (tensor.expand(2, -1, -1, -1) for tensor in (rows, key, value))
    result, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, key, value, scale=scale
    )
    return result[:count], logarithm[:count]


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
    if compiled_takes(query, key, value):
        return compiled_attention(query, key, value, attention_mask, scale), None
    row_groups = _row_groups(attention_mask, query, key, heads // kv, flash=value.shape[3] == query.shape[3])
    if len(row_groups) == 1 and row_groups[0].rows is None:
        return _attend(query, key, value, row_groups[0], scale).transpose(1, 2).contiguous(), None
    result = query.new_zeros((*query.shape[:3], value.shape[-1]))
    for group in row_groups:
        some = query[group.slots] if group.rows is None else query[group.slots, :, group.rows]
        attended = _attend(some, key[group.slots], value[group.slots], group, scale)
        if group.rows is None:
            result[group.slots] = attended
        else:
            result[group.slots, :, group.rows] = attended
    return result.transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, group: _RowGroup, scale: float) -> Tensor:
    """Attention of one group of rows: [b, heads, n, size]."""
    slots, heads, count, _ = query.shape
    kv, far = key.shape[1], group.far
    # Heads that share keys become rows: [b, kv, heads / kv * n, size].
    rows = query.reshape(slots, kv, heads // kv * count, -1)
    early = None
    if far:
        padded = nn.functional.pad(rows, (0, 0, 0, -rows.shape[2] % _ROWS))
        early = _flash(padded, key[:, :, :far], value[:, :, :far], scale)
    close, near = (tensor[:, :, far : group.stop].double() for tensor in (key, value))
    most = max(1, _ROOM // (slots * kv * close.shape[2]))
    parts = [
        _near(rows, close, near, group.bias, early, scale, slice(start, start + most))
        for start in range(0, rows.shape[2], most)
    ]
    result = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return result.to(query.dtype).reshape(slots, heads, count, -1)


def _near(
    rows: Tensor,
    close: Tensor,
    near: Tensor,
    bias: Tensor | None,
    early: tuple[Tensor, Tensor] | None,
    scale: float,
    some: slice,
) -> Tensor:
    """Attention of some rows to the near columns, merged with that to the far ones, if any."""
    scores = torch.matmul(rows[:, :, some].double() * scale, close.transpose(2, 3))
    if bias is not None:
        scores += bias[:, :, some]
    if early is None:
        return torch.matmul(scores.softmax(dim=-1), near)
    result, logarithm = (tensor[:, :, : rows.shape[2]][:, :, some] for tensor in early)
    weights = torch.cat([logarithm[..., None], scores], dim=-1).softmax(dim=-1)
    return torch.matmul(weights[..., 1:], near) + weights[..., :1] * result


def _row_groups(mask: Tensor | None, query: Tensor, key: Tensor, groups: int, flash: bool) -> list[_RowGroup]:
    """The groups of a forward's rows; they are shared by all layers with this mask.

    Args:
        flash: the flash kernel takes heads of these sizes.
    """
    width, columns = query.shape[2], key.shape[2]
    # Tried in the first forward, so that no later one waits for it.
    splits = flash and flash_is_exact(query.dtype, query.shape[3]) and columns > _BLOCK
    if mask is None and width == 1:
        return [_RowGroup(slice(None), None, _far(columns - 1) if splits else 0, None)]
    if mask is None:  # the first rows of a text
        mask = torch.ones((1, 1, width, columns), dtype=torch.bool).tril(columns - width)
        return _split(mask.expand(len(query), -1, -1, -1), groups, splits)
    shared = shared_here()
    kept: dict[Any, Any] = shared.get(mask, {})  # by the compiled attention too
    if splits not in kept:
        kept[splits] = _split(mask.expand(len(query), -1, -1, -1), groups, splits)
        shared.put(mask, kept)
    found: list[_RowGroup] = kept[splits]
    return found


def _split(mask: Tensor, groups: int, splits: bool) -> list[_RowGroup]:
    """Group rows by their far columns, if they have some. ``mask``: [B, 1, width, columns], boolean."""
    if not splits:
        return [_RowGroup(slice(None), None, 0, _bias(mask, groups))]
    seen = mask[:, 0].sum(dim=-1)
    # Number of columns before the first that a row does not attend to.
    whole = torch.where(mask[:, 0].all(dim=-1), mask.shape[-1], mask[:, 0].to(torch.uint8).argmin(dim=-1))
    far = [
        [_far(count - 1) if _far(count - 1) <= first else 0 for count, first in zip(*both, strict=True)]
        for both in zip(seen.tolist(), whole.tolist(), strict=True)
    ]
    if not any(map(any, far)):
        return [_RowGroup(slice(None), None, 0, _bias(mask, groups))]
    row_groups = []
    for slot, lengths in enumerate(far):
        slots = slice(slot, slot + 1)
        for length in sorted(set(lengths)):
            rows = torch.tensor([row for row, far_columns in enumerate(lengths) if far_columns == length])
            near = mask[slots, :, rows, length:]
            seen_by_some = near.any(dim=2).nonzero()[:, -1].tolist()  # the rows after these see more
            last = max(seen_by_some, default=near.shape[-1] - 1) + 1
            bias = _bias(near[..., :last], groups)
            some = None if len(rows) == len(lengths) else rows
            row_groups.append(_RowGroup(slots, some, length, bias, length + last))
    return row_groups


def _bias(mask: Tensor, groups: int) -> Tensor:
    """Convert a mask [b, 1, n, columns] to a bias [b, 1, groups * n, columns] of scores."""
    bias = torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    return bias.repeat(1, 1, groups, 1)


AttentionInterface.register(EXACT, exact_attention)
AttentionMaskInterface.register(EXACT, sdpa_mask)
