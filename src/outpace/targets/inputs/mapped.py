"""Weights that are pages of a file, as those read from safetensors are until somebody writes to them.

The system reads such pages when they are touched, and gets them again after they were dropped. So weights of
which steps have packed copies are not in memory twice: they are dropped once they are packed. And whether any
of their numbers was written, counted or not, the system knows: a page that was is no page of the file.

On Linux since 6.7, which answers that for a range of memory; elsewhere no weights count as a file's.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

try:
    import fcntl
except ImportError:  # then the system does not tell
    fcntl = None  # type: ignore[assignment]

_PAGE = mmap.PAGESIZE
_DONT_NEED = 4  # MADV_DONTNEED
# ioctl PAGEMAP_SCAN, and its argument: pages of no file that are in memory or swapped out.
_SCAN, _FORM = 0xC0606610, "12Q"
_FILE, _PRESENT, _SWAPPED = 4, 8, 16

Range = tuple[int, int]


class FileMemory:
    """The process's private mappings of files, as they are now."""

    def __init__(self) -> None:
        self._mappings = sorted(_mappings())

    def ranges(self, tensors: Iterable[Tensor]) -> list[Range]:
        """The pages of those tensors that lie in a mapping, of which no page was written to."""
        found = (self._range(tensor) for tensor in tensors if not tensor.is_meta and tensor.is_cpu)
        return [one for one in found if one is not None and not written([one])]

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Give back the memory of tensors that the file has as they are."""
        for start, stop in self.ranges(tensors):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONT_NEED)

    def _range(self, tensor: Tensor) -> Range | None:
        start = tensor.data_ptr() // _PAGE * _PAGE
        stop = -(-(tensor.data_ptr() + tensor.nbytes) // _PAGE) * _PAGE
        held = any(first <= start and stop <= last for first, last in self._mappings)
        return (start, stop) if held and tensor.is_contiguous() else None


def written(ranges: Sequence[Range]) -> bool:
    """True if some page was written to since its file was mapped."""
    if not ranges:
        return False
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        return any(_scanned(pages.fileno(), start, stop) for start, stop in ranges)


def _scanned(pages: int, start: int, stop: int) -> int:
    found = (ctypes.c_uint64 * 3)()  # a range, of which the first page is enough
    either = _PRESENT | _SWAPPED
    where = start, stop, 0, ctypes.addressof(found), 1, 1
    size = struct.calcsize(_FORM)
    asked = struct.pack(_FORM, size, 0, *where, _FILE, _FILE, either, either)
    return int(fcntl.ioctl(pages, _SCAN, bytearray(asked)))


def _mappings() -> list[Range]:
    """Private mappings of files; none where the system does not tell what was written."""
    if sys.platform != "linux" or fcntl is None:
        return []
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = [line.split(maxsplit=5) for line in lines]
        kept = [
            parts[0].split("-")
            for parts in fields
            if len(parts) == 6 and parts[1] == "rw-p" and parts[5][0] == "/"
        ]
        found = [(int(first, 16), int(last, 16)) for first, last in kept]
        written(found[:1])
    except (OSError, ValueError):
        return []
    return found
