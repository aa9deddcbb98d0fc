"""Attention of rows whose keys and values are in a cache already, by the function of fused layers.

A row's sums are in the order of its own columns, as ``native/layers.c`` has it, so its bits do not depend on
other rows, or on where its columns are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outpace.native.layers import DTYPES, HeadsStruct, byref, functions
from outpace.native.pointers import check, pointer, rows_pointer
from outpace.targets.cpu.fused_rows import HeadSizes, LayerRows, Written
from outpace.targets.cpu.fusible import HEAD_SIZE
from outpace.targets.inputs.shared import shared_here

_NO_MASK = torch.empty(0)  # what rows without a mask are found by


def compiled_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if the compiled function computes attention of these dtypes and sizes here."""
    return (
        query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and not query.shape[3] % HEAD_SIZE
        and not isinstance(functions(query.dtype), str)
    )


def compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention; arguments and result as those of ``exact_attention``."""
    batch, heads, width, size = query.shape
    shared, dtype = key.shape[1], query.dtype
    check(not heads % shared and len(key) == batch and key.shape[3] == size, f"keys of {batch} sequences")
    rows = _rows(HeadSizes(heads, shared, size, dtype), mask, Written(range(batch), width, key.shape[2]))
    keys, values = _laid_out(key, value)
    strides = keys.stride()[:2]
    given = query.transpose(1, 2).contiguous()
    result = torch.empty_like(given)
    addresses = [rows_pointer(tensor, dtype, key.shape, strides) for tensor in (keys, values)]
    struct = HeadsStruct(
        query=pointer(given, dtype, batch, width, heads, size),
        query_stride=heads * size,
        scale=scale,
        keys=addresses[0],
        values=addresses[1],
        sequence_stride=strides[0],
        head_stride=strides[1],
        out=pointer(result, dtype, batch, width, heads, size),
    )
    library: Any = functions(dtype)
    if library.attention(rows.pointer, byref(struct)):
        raise MemoryError("attention found no memory for its workspace")
    return result


def _rows(heads: HeadSizes, mask: Tensor | None, window: Written) -> LayerRows:
    """The rows of a forward; they are shared by all layers with this mask."""
    shared, key = shared_here(), _NO_MASK if mask is None else mask
    kept: dict[Any, Any] = shared.get(key, {})
    if (heads, window) not in kept:
        if mask is not None:
            seen = 1, window.width, window.columns
            check(mask.shape[1:] == seen, f"a mask of {seen} for each sequence, not {mask.shape}")
            mask = mask.expand(len(window.slots), -1, -1, -1)
        kept[heads, window] = LayerRows(heads, mask, None, window, None)
        shared.put(key, kept)
    found: LayerRows = kept[heads, window]
    return found


def _laid_out(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the same strides, a head's rows one after the other; copied if they are not."""
    if key.stride() == value.stride() and key.stride()[2:] == (key.shape[3], 1):
        return key, value
    return key.clone(memory_format=torch.contiguous_format), value.clone(
        memory_format=torch.contiguous_format
    )
