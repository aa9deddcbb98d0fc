"""Attention of rows whose keys and values are in a cache already, by the function of native forwards.

A row's sums are in the order of its own columns, as ``native/layers.c`` has it, so its bits do not depend on
other rows, or on where its columns are.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.native.layers import DTYPES, HeadsStruct, RowsStruct, byref, functions
from outpace.native.pointers import address, check, pointer, rows_pointer
from outpace.targets.inputs.context import forward_context

HEAD_SIZE = 32  # the size of heads is a multiple of this
_INT = np.dtype(np.int32)
_NO_MASK = torch.empty(0)  # what rows without a mask are found by


def compiled_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if the compiled function computes attention of these dtypes here."""
    form = _form(query.dtype)
    return query.dtype == key.dtype == value.dtype and form in DTYPES and not isinstance(functions(form), str)


def _form(dtype: torch.dtype) -> torch.dtype:
    """The dtype that attention of a dtype is computed in."""
    return torch.float32 if dtype == torch.float16 else dtype


def compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention; arguments and result as those of ``exact_attention``.

    Zeros bring heads to a size that the function takes, which adds nothing to their sums. So do keys of
    another size than their values.
    """
    dtype, wide = query.dtype, value.shape[3]
    size = -(-max(query.shape[3], wide) // HEAD_SIZE) * HEAD_SIZE
    query, key, value = (_sized(tensor.to(_form(dtype)), size) for tensor in (query, key, value))
    result = _attention(query, key, value, mask, scale)
    return result if wide == size and result.dtype == dtype else result[..., :wide].to(dtype).contiguous()


def _sized(tensor: Tensor, size: int) -> Tensor:
    """Heads with zeros up to a size."""
    missing = size - tensor.shape[3]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    batch, heads, width, size = query.shape
    shared, dtype = key.shape[1], query.dtype
    check(not heads % shared and len(key) == batch and key.shape[3] == size, f"keys of {batch} sequences")
    rows = _rows(Sizes(batch, width, key.shape[2], heads, shared, size, dtype), mask)
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


class Sizes(NamedTuple):
    """Numbers of sequences, of rows and columns of each, of heads and of those with keys, and their form."""

    batch: int
    width: int
    columns: int
    heads: int
    shared: int
    size: int
    dtype: torch.dtype


def _rows(sizes: Sizes, mask: Tensor | None) -> AttendedRows:
    """The rows of a forward; they are shared by all layers with this mask."""
    shared, key = forward_context(), _NO_MASK if mask is None else mask
    kept: dict[Any, Any] = shared.get(key, {})
    if sizes not in kept:
        if mask is not None:
            seen = 1, sizes.width, sizes.columns
            check(mask.shape[1:] == seen, f"a mask of {seen} for each sequence, not {mask.shape}")
            mask = mask.expand(sizes.batch, -1, -1, -1)
        kept[sizes] = AttendedRows(sizes, mask)
        shared.put(key, kept)
    found: AttendedRows = kept[sizes]
    return found


class AttendedRows:
    """Rows of sequences and the columns that each attends to, as ``native/rows.h`` reads them.

    Args:
        mask: boolean [batch, 1, width, columns]; None if each row attends to all before it.
    """

    def __init__(self, sizes: Sizes, mask: Tensor | None) -> None:
        batch, width, columns, *heads, dtype = sizes
        count = batch * width
        # Padding may make more rows than columns, and every row attends to what its mask has.
        place = np.tile(np.maximum(np.arange(columns - width, columns, dtype=np.int32), 0), batch)
        order = np.arange(count, dtype=np.int32)
        sequence, begin = order // width, np.arange(batch + 1, dtype=np.int32) * width
        arrays = [order, sequence, place, *_columns(functions(dtype), mask, order, place)]
        self._arrays = [*arrays, begin]  # whose addresses the struct has
        self._queries = torch.empty(count, heads[0], heads[2])
        names = ("order", "sequence", "place", "first", "run", "count", "start", "columns")
        struct = RowsStruct(
            rows=count,
            sequences=batch,
            heads=heads[0],
            shared=heads[1],
            size=heads[2],
            begin=address(begin, _INT, batch + 1),
            queries=pointer(self._queries, torch.float32, count, heads[0], heads[2]),
            **{name: address(array, _INT, len(array)) for name, array in zip(names, arrays, strict=True)},
        )
        self.pointer = ctypes.pointer(struct)


def _columns(library: Any, mask: Tensor | None, cells: Any, place: Any) -> list[Any]:
    """The arrays ``first``, ``run``, ``count``, ``start`` and ``columns`` of ``struct rows``."""
    rows = len(cells)
    if mask is None:
        zeros, run = np.zeros(rows, dtype=np.int32), place + 1
        return [zeros, run, run, zeros, zeros]
    if mask.dtype != torch.bool:
        raise OutpaceError(f"compiled attention takes boolean masks, not {mask.dtype}")
    seen, (batch, _, width, columns) = mask.contiguous(), mask.shape
    check(rows == batch * width, f"a mask of {rows} rows")
    first, run, count, start = np.empty((4, rows), dtype=np.int32)
    arrays = (address(array, _INT, rows) for array in (cells, place, first, run, count, start))
    arguments = (pointer(seen, torch.bool, batch, 1, width, columns), rows, columns, *arrays)
    listed = np.empty(max(library.read_mask(*arguments, None), 1), dtype=np.int32)
    library.read_mask(*arguments, address(listed, _INT, len(listed)))
    return [first, run, count, start, listed]


def _laid_out(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the same strides, a head's rows one after the other; copied if they are not."""
    if key.stride() == value.stride() and key.stride()[2:] == (key.shape[3], 1):
        return key, value
    return key.clone(memory_format=torch.contiguous_format), value.clone(
        memory_format=torch.contiguous_format
    )
