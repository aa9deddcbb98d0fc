"""Compiled functions (``layers.c``): a step's matrix products, what is between them, the best logits."""

from __future__ import annotations

import ctypes
from ctypes import CDLL, POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from outpace.native.forward import STRUCTS as FORWARD_STRUCTS
from outpace.native.forward import BatchStruct, DecoderStruct, ForwardRoomStruct, NormStruct, ProductStruct
from outpace.native.packaged import FOLDER
from outpace.native.pointers import check, pointer
from outpace.native.pool import pooled

_DEFINED = {torch.bfloat16: ("-DREAL16",), torch.float32: ()}

DTYPES = frozenset(_DEFINED)
SHARE = 32  # inputs of a block of rounded weights
LANES = 16  # rows of ``norm`` have a multiple of this size, those of ``gated`` at least this size


class RowsStruct(Structure):
    """``struct rows`` of ``rows.h``."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "sequences", "heads", "shared", "size")),
        *((name, c_int32) for name in ("rotary", "interleaved")),
        *((name, c_void_p) for name in ("order", "begin", "sequence", "place")),
        *((name, c_void_p) for name in ("first", "run", "count", "start", "columns")),
        *((name, c_void_p) for name in ("angle", "cosine", "sine", "queries")),
    ]


class HeadsStruct(Structure):
    """``struct heads`` of ``rows.h``."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, c_float) for name in ("scale", "cap")),
        *((name, c_void_p) for name in ("each_query", "each_key")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("sequence_stride", "head_stride")),
        *((name, c_void_p) for name in ("held", "out")),
    ]


STRUCTS: dict[str, type[Structure]] = {
    "product": ProductStruct,
    "rows": RowsStruct,
    "heads": HeadsStruct,
    **FORWARD_STRUCTS,
}
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "panel_outputs": (c_int, []),
    "rounded_outputs": (c_int, []),
    "pair_inputs": (c_int, []),
    "quant_numbers": (c_int64, [c_int]),
    "quant_bytes": (c_int64, [c_int]),
    "quant_panel": (c_int64, [c_int, c_int64]),
    "quant_pack": (None, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "quant_unpack": (None, [c_int, c_void_p, c_int64, c_int64, c_void_p]),
    "quant_rows": (None, [c_int, c_void_p, c_int64, c_void_p, c_int64, c_void_p]),
    "multiply": (c_int, [POINTER(ProductStruct), c_int64, *[c_void_p] * 2]),
    "pack": (c_int64, [POINTER(ProductStruct), c_void_p]),
    "unpack": (None, [POINTER(ProductStruct), c_void_p]),
    "norm": (None, [POINTER(NormStruct), c_int64, c_int64, *[c_void_p] * 2]),
    "best": (None, [*[c_int64] * 3, *[c_void_p] * 4]),
    "attention": (c_int, [POINTER(RowsStruct), POINTER(HeadsStruct)]),
    "listed": (c_int64, [POINTER(DecoderStruct), POINTER(BatchStruct)]),
    "forward": (c_int, [POINTER(DecoderStruct), POINTER(BatchStruct), POINTER(ForwardRoomStruct)]),
    "read_mask": (c_int64, [c_void_p, c_int32, c_int32, *[c_void_p] * 7]),
}


@lru_cache(maxsize=4)
def functions(dtype: torch.dtype) -> CDLL | str:
    """The functions for activations of a dtype, one of ``DTYPES``; the reason why there are none here."""
    return pooled(FOLDER / "layers.c", _SIGNATURES, *_DEFINED[dtype], structs=STRUCTS)


def best(rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` greatest logits of each row [n, size], in descending order; from one up to all.

    By torch where there is no compiled function.

    Returns:
        The logits and their places, each [n, count], and the logs of the sums of the rows' exponentials, [n].
        Logits and logs are in float32, or in the rows' dtype if that is wider.

    Raises:
        OutpaceError: there are not that many.
    """
    many, size = rows.shape
    check(1 <= count <= size, f"the best 1 to {size} of {size} logits, not {count}")
    found = functions(rows.dtype) if rows.device.type == "cpu" and rows.dtype in DTYPES else ""
    if isinstance(found, str):
        wide = rows.float() if rows.dtype.itemsize < 4 else rows
        return *wide.topk(count), wide.logsumexp(dim=-1)
    given, scores, totals = rows.contiguous(), torch.empty(many, count), torch.empty(many)
    places = torch.empty(many, count, dtype=torch.long)
    found.best(
        many,
        size,
        count,
        pointer(given, rows.dtype, many, size),
        pointer(scores, torch.float32, many, count),
        pointer(places, torch.long, many, count),
        pointer(totals, torch.float32, many),
    )
    return scores, places, totals


byref = ctypes.byref
