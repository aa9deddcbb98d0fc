"""Compiled functions for a step's matrix products, and for what is between them (``native.c``).

They are compiled with the machine's C compiler on first use, for its processor, and kept in the user's cache
folder. They run in torch's threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from ctypes import CDLL, POINTER, Structure, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from outpace.core import first_line
from outpace.embedded import cache_path
from outpace.targets.hardware import processor

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")
_DEFINED = {torch.bfloat16: ("-DREAL16",), torch.float32: ()}

DTYPES = frozenset(_DEFINED)


class RowsStruct(Structure):
    """``struct rows`` of ``native.c``."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "sequences", "heads", "shared", "size")),
        *((name, c_void_p) for name in ("order", "begin", "sequence", "place")),
        *((name, c_void_p) for name in ("first", "run", "count", "start", "columns")),
        *((name, c_void_p) for name in ("cosine", "sine", "queries")),
    ]


class HeadsStruct(Structure):
    """``struct heads`` of ``native.c``."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, c_void_p) for name in ("query_norm", "key_norm")),
        *((name, c_float) for name in ("epsilon", "scale")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("sequence_stride", "head_stride")),
        ("out", c_void_p),
    ]


class ProductStruct(Structure):
    """``struct product`` of ``native.c``."""

    _fields_ = [("inputs", c_long), ("outputs", c_long), ("weights", c_void_p), ("bias", c_void_p)]


class BlockStruct(Structure):
    """``struct block`` of ``native.c``."""

    _fields_ = [
        *((name, ProductStruct) for name in ("joined", "output", "gates", "down")),
        *((name, c_void_p) for name in ("before", "between")),
        ("epsilon", c_float),
    ]


class RoomStruct(Structure):
    """``struct room`` of ``native.c``."""

    _fields_ = [(name, c_void_p) for name in ("state", "joined", "attended", "both", "inner")]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "panel_outputs": (c_int, []),
    "pair_inputs": (c_int, []),
    "multiply": (None, [POINTER(ProductStruct), c_long, *[c_void_p] * 2]),
    "norm": (None, [c_long, c_long, *[c_void_p] * 3, c_float, *[c_void_p] * 2]),
    "gated": (None, [c_long, c_long, *[c_void_p] * 2, c_long, c_void_p]),
    "attention": (c_int, [POINTER(RowsStruct), POINTER(HeadsStruct)]),
    "layers": (
        c_int,
        [
            *(c_int, POINTER(POINTER(BlockStruct)), POINTER(RoomStruct), c_long, c_void_p, POINTER(c_void_p)),
            *(c_int, POINTER(POINTER(RowsStruct)), POINTER(HeadsStruct)),
        ],
    ),
    "read_mask": (c_int64, [c_void_p, c_int32, c_int32, *[c_void_p] * 7]),
}


@lru_cache(maxsize=4)
def functions(dtype: torch.dtype) -> CDLL | str:
    """The functions for activations of a dtype, one of ``DTYPES``; the reason why there are none here."""
    if sys.platform != "linux":
        return f"compiled functions are for Linux, not {sys.platform}"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "there is no C compiler; install gcc or clang, or set CC"
    # torch's own OpenMP library, so that both use the same threads.
    threads = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")) or sorted(
        (Path(torch.__file__).parent.parent / "torch.libs").glob("libgomp*")
    )
    command = [compiler, *_FLAGS, *_DEFINED[dtype], str(_SOURCE), *map(str, threads[:1])]
    about = "\n".join([*command, _SOURCE.read_text("utf-8"), processor(), platform.machine(), _features()])
    library = cache_path() / "native" / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.so"
    try:
        if not library.exists():
            _compile(command, library)
        found = CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("no compiled steps", exc_info=True)
        return f"{compiler} could not compile them: {first_line(error)}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def _compile(command: list[str], library: Path) -> None:
    """Compile beside the library's place and move it there, so that no other process reads a partial file."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        done = subprocess.run(
            [*command, "-o", str(made), "-lm"], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise OSError(done.stderr.strip() or f"exit status {done.returncode}")
        made.replace(library)


def _features() -> str:
    """The processor's instruction sets, since a cache folder may be shared by machines."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def pointer(tensor: Any) -> int | None:
    """Address of a tensor's data; None for None."""
    return None if tensor is None else int(tensor.data_ptr())


def address(array: Any) -> int:
    """Address of a NumPy array's data."""
    return int(array.ctypes.data)


byref = ctypes.byref
