"""The rows of a forward's windows, as ``native/rows.h`` reads them, and where a layer finds them."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.cache import Window
from outpace.core import OutpaceError
from outpace.native.layers import HeadsStruct, RowsStruct, functions
from outpace.native.pointers import address, check, pointer, pointer_or_null, rows_pointer
from outpace.targets.cpu.fused_layer import Layer
from outpace.targets.inputs.forward import CacheAdapter
from outpace.targets.inputs.line import windows_in

_INT = np.dtype(np.int32)


def heads_of(
    layer: Layer, parts: RowsByWindow, cache: CacheAdapter, inputs: Tensor, product: int, attended: int
) -> list[HeadsStruct]:
    """The addresses of a layer's queries, keys, values, cache and results of attention, per window.

    Args:
        product, attended: addresses of [n, queries, keys and values] and [n, heads * size].
    """
    queries, keys, item = layer.heads * layer.size, layer.shared * layer.size, inputs.element_size()
    stride, dtype = queries + 2 * keys, inputs.dtype
    query_norm, key_norm = (
        pointer_or_null(norm, dtype, layer.size) for norm in (layer.query_norm, layer.key_norm)
    )
    structs = []
    for start, window, rows in parts:
        cached = cache.buffers(layer.number, window)
        query = product + start * stride * item
        key = query + queries * item
        shape, strides = (rows.sequences, layer.shared, rows.columns, layer.size), cached[0].stride()[:2]
        cached_keys, cached_values = (rows_pointer(tensor, dtype, shape, strides) for tensor in cached)
        structs.append(
            HeadsStruct(
                query=query,
                key=key,
                value=key + keys * item,
                query_stride=stride,
                key_stride=stride,
                value_stride=stride,
                query_norm=query_norm,
                key_norm=key_norm,
                epsilon=layer.epsilon,
                scale=layer.scale,
                keys=cached_keys,
                values=cached_values,
                sequence_stride=strides[0],
                head_stride=strides[1],
                out=attended + start * queries * item,
            )
        )
    return structs


def rows_of(
    layer: Layer, mask: Tensor | None, cache: CacheAdapter, rotation: tuple[Tensor, Tensor]
) -> RowsByWindow:
    """The rows of a forward's windows."""
    heads = HeadSizes(layer.heads, layer.shared, layer.size, layer.before.dtype)
    window = cache.window
    if isinstance(window, Window):
        return [(0, window, LayerRows(heads, mask, None, window, rotation))]
    assert mask is not None
    rows = []
    for in_line in windows_in(mask, cache.shared):
        rotated = rotation[0][:, in_line.span], rotation[1][:, in_line.span]
        in_window = LayerRows(heads, in_line.mask, in_line.cells, in_line.window, rotated)
        rows.append((in_line.span.start, in_line.window, in_window))
    return rows


class HeadSizes(NamedTuple):
    """Numbers of a layer's heads, of those that have keys, and of a head's elements, and their dtype."""

    heads: int
    shared: int
    size: int
    dtype: torch.dtype


class Written(NamedTuple):
    """What ``LayerRows`` reads of a window, of rows whose keys and values are in the cache already."""

    slots: range
    width: int
    columns: int

    @property
    def offsets(self) -> list[int]:
        return [self.columns - self.width] * len(self.slots)

    @property
    def widths(self) -> list[int]:
        return [self.width] * len(self.slots)


class LayerRows:
    """The rows of a window and the columns that each attends to, as ``native/rows.h`` reads them.

    Args:
        mask: boolean [B, 1, width, columns], of rows in a line too; None or without columns if each row
            attends to all before it.
        line: places of the rows in the window, if they are in a line and not all of it.
        rotation: cosines and sines of the rows' positions, each [B or 1, width, size]; None for queries that
            are rotated, of keys and values that are written already.

    Attributes:
        count: number of rows.
        sequences, columns: numbers of the cache's sequences, and of their rows, that are read or written.
    """

    def __init__(
        self,
        heads: HeadSizes,
        mask: Tensor | None,
        line: Tensor | None,
        window: Window | Written,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> None:
        batch, width = len(window.slots), window.width
        if line is None:
            cells = np.arange(batch * width)
        else:
            cells = line.numpy()
            check(0 <= cells.min(initial=0) <= cells.max(initial=0) < batch * width, f"{batch * width} cells")
        grid = np.full((batch, width), -1, dtype=np.int32)
        for row, offset, fed in zip(grid, window.offsets, window.widths, strict=True):
            row[:fed] = np.arange(offset, offset + fed)
        column = np.ascontiguousarray(grid.reshape(-1)[cells])
        sequence = (cells // width).astype(np.int32)
        order = np.argsort(sequence, kind="stable").astype(np.int32)
        begin = np.searchsorted(sequence[order], np.arange(batch + 1)).astype(np.int32)
        count = len(cells)
        size = heads.size
        *per_row, columns = _columns(functions(heads.dtype), mask, cells, column, grid.size)
        first, run, counts, start = per_row
        self._arrays = [order, begin, sequence, column, *per_row, columns]  # whose addresses the struct has
        grid_shape = (batch, width, size) if line is None else (1, count, size)
        self._rotation = [angles.expand(grid_shape).reshape(count, size) for angles in rotation or ()]
        self._queries = torch.empty(count, heads.heads, size)
        self.count, self.sequences = count, batch
        self.columns = max(window.columns, 0 if mask is None else mask.shape[-1])
        cosine, sine = [pointer(each, heads.dtype, count, size) for each in self._rotation] or (None, None)
        struct = RowsStruct(
            rows=count,
            sequences=batch,
            heads=heads.heads,
            shared=heads.shared,
            size=size,
            rotary=size,
            order=address(order, _INT, count),
            begin=address(begin, _INT, batch + 1),
            sequence=address(sequence, _INT, count),
            place=address(column, _INT, count),
            first=address(first, _INT, count),
            run=address(run, _INT, count),
            count=address(counts, _INT, count),
            start=address(start, _INT, count),
            columns=address(columns, _INT, len(columns)),
            cosine=cosine,
            sine=sine,
            queries=pointer(self._queries, torch.float32, count, heads.heads, size),
        )
        self.pointer = ctypes.pointer(struct)


def _columns(library: Any, mask: Tensor | None, cells: Any, column: Any, grid: int) -> list[Any]:
    """The arrays ``first``, ``run``, ``count``, ``start`` and ``columns`` of ``struct rows``.

    Args:
        cells: the rows' indices in the window, below ``grid``.
        column: that each row is written to; -1 in padding.
    """
    rows = len(cells)
    if mask is None or not mask.shape[-1]:
        zeros, run = np.zeros(rows, dtype=np.int32), column + 1  # none for padding
        return [zeros, run, run, zeros, zeros]
    if mask.dtype != torch.bool:
        raise OutpaceError(f"a fused layer takes boolean masks, not {mask.dtype}")
    seen, (batch, _, width, columns) = mask.contiguous(), mask.shape
    at = cells.astype(np.int32)
    check(grid <= batch * width, f"a mask of {grid} rows")
    first, run, count, start = np.empty((4, rows), dtype=np.int32)
    arrays = (address(array, _INT, rows) for array in (at, column, first, run, count, start))
    arguments = (pointer(seen, torch.bool, batch, 1, width, columns), rows, columns, *arrays)
    listed = np.empty(max(library.read_mask(*arguments, None), 1), dtype=np.int32)
    library.read_mask(*arguments, address(listed, _INT, len(listed)))
    return [first, run, count, start, listed]


# The rows of each window of a forward, after the number of rows before them.
RowsByWindow = list[tuple[int, Window, LayerRows]]
