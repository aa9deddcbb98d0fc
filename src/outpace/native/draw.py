"""The compiled draw (``draw.c``): keyed draws from many rows of scores."""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, c_double, c_int64, c_long, c_uint64, c_void_p
from functools import lru_cache

from outpace.native.packaged import FOLDER
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
    """The function of ``draw.c``; the reason why there is none here."""
    arguments = [c_long, c_long, c_void_p, c_void_p, POINTER(DrawStruct)]
    return pooled(FOLDER / "draw.c", {"draw_rows": (None, arguments)}, structs={"draw": DrawStruct})
