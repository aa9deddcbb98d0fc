"""Compiled functions on logits (``draw.c``): keyed draws from many rows, rows in float32."""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, c_double, c_int64, c_uint64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from outpace.native.build import Signatures
from outpace.native.packaged import FOLDER
from outpace.native.pointers import pointer
from outpace.native.pool import pooled


class DrawStruct(Structure):
    """``struct draw`` of ``draw.c``."""

    _fields_ = [
        ("key", c_uint64),
        ("top_k", c_int64),
        *((name, c_double) for name in ("temperature", "top_p", "margin", "min_p")),
        ("token", c_int64),
    ]


@lru_cache(maxsize=1)
def functions() -> CDLL | str:
    """The functions of ``draw.c``; the reason why there are none here."""
    signatures: Signatures = {
        "draw_rows": (None, [c_int64, c_int64, c_void_p, c_void_p, POINTER(DrawStruct)]),
        "widen": (None, [c_int64, c_void_p, c_void_p]),
    }
    return pooled(FOLDER / "draw.c", signatures, structs={"draw": DrawStruct})


def as_float32(rows: Tensor) -> Tensor:
    """``rows.float()``, without waking torch's threads for bfloat16 logits on a CPU.

    After an operation of torch on as many numbers as a vocabulary has, its threads wait awake for the next
    one, on the cores that the threads of the next forward need.
    """
    compiled = functions()
    if rows.dtype is not torch.bfloat16 or not rows.is_cpu or isinstance(compiled, str):
        return rows.float()
    rows, found = rows.contiguous(), torch.empty(rows.shape)
    given = pointer(rows, torch.bfloat16, *rows.shape)
    compiled.widen(rows.numel(), given, pointer(found, torch.float32, *rows.shape))
    return found
