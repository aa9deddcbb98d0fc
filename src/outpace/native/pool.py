"""The threads of functions in C (``pool.c``): one pool in a process, which every library is handed.

Where somebody sets the number of torch's threads (``torch.set_num_threads``, ``OMP_NUM_THREADS``), there are
as many of them. With torch's default there are no more than that, nor than ``processors.py`` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import CDLL, Structure, c_int, c_uint64, c_void_p, cast
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from outpace.native.build import NO_STRUCTS, Signatures, compiled
from outpace.native.packaged import FOLDER
from outpace.native.processors import usual_threads

_SIGNATURES: Signatures = {
    "pool_wish": (None, [c_int]),
    "pool_usual": (None, [c_int]),
    "pool_usual_threads": (c_int, []),
    "pool_threads": (c_int, []),
    "pool_workers": (c_int, []),
    "pool_stalls": (c_uint64, []),
}


class Pool(NamedTuple):
    """The pool.

    Attributes:
        torch_threads: torch's number when it was made.
    """

    library: CDLL
    torch_threads: int


@lru_cache(maxsize=1)
def pool() -> Pool | str:
    """The pool of this process; the reason why there is none here."""
    library = compiled(FOLDER / "pool.c", _SIGNATURES)
    if isinstance(library, str):
        return library
    usual, current = usual_threads(), torch.get_num_threads()
    library.pool_usual(usual.number if usual.forced else min(usual.number, current))
    return Pool(library, current)


def pooled(
    source: Path, signatures: Signatures, *flags: str, structs: Mapping[str, type[Structure]] = NO_STRUCTS
) -> CDLL | str:
    """``compiled``, for functions whose work the threads share."""
    library, shared = compiled(source, signatures, *flags, structs=structs), pool()
    if isinstance(library, str) or isinstance(shared, str):
        return library
    library.use_pool.argtypes = [c_void_p]
    library.use_pool(cast(shared.library.pool_share, c_void_p))
    return library


def follow_torch() -> int:
    """Let functions called by this thread use as many threads as torch is told to.

    Returns:
        The number of threads of a step: theirs, or torch's where there are none.
    """
    shared, count = pool(), torch.get_num_threads()
    if isinstance(shared, str):
        return count
    shared.library.pool_wish(0 if count == shared.torch_threads else count)
    return int(shared.library.pool_threads())
