"""The compiled move (``move.c``): rows of a cache's slots to other places."""

from __future__ import annotations

from ctypes import CDLL, c_int64, c_void_p
from functools import lru_cache

from outpace.native.build import compiled
from outpace.native.packaged import FOLDER


@lru_cache(maxsize=1)
def functions() -> CDLL | str:
    """The function of ``move.c``; the reason why there is none here."""
    arguments = [c_void_p, *[c_int64] * 7, *[c_void_p] * 3]
    return compiled(FOLDER / "move.c", {"move_rows": (None, arguments)})
