"""Memory for packed weights, in huge pages where the system gives them to who asks.

A step reads all weights once. In pages of 4 KiB a core of a virtual machine waits for translations of
addresses for up to a third of that time (docs/measurements/steps.md). Most distributions of Linux give huge
pages to memory that asks for them (``/sys/kernel/mm/transparent_hugepage/enabled``).
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from outpace.native.pointers import pointer

HUGE = 2 << 20  # bytes of a huge page of x86; others are multiples, or are not given
_SLAB = 16 * HUGE
_LINE = 64  # of a cache
_SETTING = "sys/kernel/mm/transparent_hugepage/enabled"


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros, which begins at a cache line.

    It shares huge pages with others: matrices of a small model are smaller than one. They live until the last
    of their tensors is dropped.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    return _slabs().take(size).view(dtype).view(shape)


def pages(root: Path = Path("/")) -> str:
    """The kind of pages that packed weights lie in, and what would make them huge.

    Args:
        root: the folder of the system's files.
    """
    try:
        settings = (root / _SETTING).read_text("utf-8")
    except OSError:
        return "the system's usual ones"
    if "[never]" not in settings:
        return "huge"
    return f"of 4 KiB, in which steps take longer; to have huge ones: echo madvise | sudo tee /{_SETTING}"


class _Slabs:
    """Memory that is handed out front to back, and never twice."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Bytes, [size], all zero."""
        whole = -(-size // _LINE) * _LINE
        with self._lock:
            if whole > len(self._rest):
                self._rest = _mapped(max(_SLAB, -(-whole // HUGE) * HUGE))
            taken, self._rest = self._rest[:size], self._rest[whole:]
        return taken


@lru_cache(maxsize=1)
def _slabs() -> _Slabs:
    return _Slabs()


def _mapped(size: int) -> Tensor:
    """Bytes of the system, [size], from the beginning of a huge page."""
    room = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with torch.inference_mode(False):  # so that it can be written in and outside of it
        bytes_ = torch.frombuffer(room, dtype=torch.uint8)
    start = -pointer(bytes_, torch.uint8, size + HUGE) % HUGE
    with suppress(OSError):  # a kernel without huge pages: it is memory like other
        room.madvise(mmap.MADV_HUGEPAGE, start, size)
    return bytes_[start : start + size]
