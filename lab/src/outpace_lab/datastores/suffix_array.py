"""Suffix array over tokens, built by libdivsufsort and searched by bisection.

Tokens are stored in a fixed number of bytes, the most significant first. Comparing bytes then compares
tokens, and a library that sorts suffixes of bytes sorts suffixes of tokens: of its result only the suffixes
that begin at a token are kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outpace.core import load_extra

Bytes = NDArray[np.uint8]

MOST_BYTES = 2**31 - 1  # the most that libdivsufsort sorts with 32-bit places
_AT_ONCE = 1 << 22  # places filtered at once


class Range(NamedTuple):
    """The places ``first`` to ``last`` - 1 of a suffix array, whose suffixes share ``length`` tokens."""

    length: int
    first: int
    last: int


NOWHERE = Range(0, 0, 0)


def bytes_per_token(largest: int) -> int:
    """Number of bytes that can store every token from 0 to ``largest``."""
    return max(1, (largest.bit_length() + 7) // 8)


def to_bytes(tokens: NDArray[np.integer], width: int) -> Bytes:
    """Tokens, shape [n], as bytes, shape [n, width]."""
    wide = np.ascontiguousarray(tokens, dtype=">u8")
    return wide.view(np.uint8).reshape(-1, 8)[:, 8 - width :]


def from_bytes(text: Bytes) -> NDArray[np.int64]:
    """Bytes, shape [..., width], as tokens, shape [...]."""
    width = text.shape[-1]
    tokens = text[..., 0].astype(np.int64)
    for place in range(1, width):
        tokens = tokens << 8 | text[..., place]
    return tokens


def key_of(tokens: Iterable[int], width: int) -> bytes:
    """Tokens as a key for ``SuffixArray.longest``."""
    return b"".join(token.to_bytes(width, "big") for token in tokens)


def sort_suffixes(text: Bytes) -> Iterator[NDArray[np.uint32]]:
    """Yield the suffix array of a text piece by piece: places of tokens, counted from 0.

    Sorting takes ``4 * width`` bytes per token besides the text itself.

    Args:
        text: contiguous, shape [n, width], of at most ``MOST_BYTES`` bytes.

    Raises:
        OutpaceError: pydivsufsort is not installed.
    """
    divsufsort = load_extra("pydivsufsort", "building a datastore", "datastore", "outpace-lab").divsufsort
    width = text.shape[1]
    if not len(text):
        return
    order = _interruptible(lambda: divsufsort(text.reshape(-1)))
    for start in range(0, len(order), _AT_ONCE):
        some = order[start : start + _AT_ONCE]
        yield (some if width == 1 else some[some % width == 0] // width).astype(np.uint32)


def _interruptible(work: Callable[[], NDArray[np.int32]]) -> NDArray[np.int32]:
    """Run a long library call in a thread, since Python handles Ctrl-C only between its own instructions."""
    answer: Future[NDArray[np.int32]] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()
    return answer.result()


class SuffixArray:
    """A text and its sorted suffixes.

    Args:
        text: contiguous, shape [n, width]; may be a memory map.
        order: places where the suffixes begin, in the order of the suffixes, shape [n].
    """

    def __init__(self, text: Bytes, order: NDArray[np.uint32]) -> None:
        self.text = text
        self.order = order
        self.width = text.shape[1]
        # Slicing a memory view takes a third of the time of slicing an array.
        self._bytes = text.reshape(-1).data

    def longest(self, key: bytes) -> Range:
        """The places of the longest prefix of ``key`` that occurs: three bisections, O(log n) comparisons.

        The suffix with the longest common prefix is one of the two between which ``key`` would be sorted.

        Args:
            key: tokens as bytes, see ``key_of``.
        """
        order, size = self.order, len(key)
        place = bisect_left(order, key, key=lambda start: self._read(start, size))
        near = range(max(place - 1, 0), min(place + 1, len(order)))
        length = max((_shared(key, self._read(order[i], size), self.width) for i in near), default=0)
        if not length:
            return NOWHERE
        size = length * self.width
        shared = key[:size]
        first = bisect_left(order, shared, 0, place, key=lambda start: self._read(start, size))
        last = bisect_right(order, shared, place, len(order), key=lambda start: self._read(start, size))
        return Range(length, first, last)

    def _read(self, start: np.uint32, size: int) -> bytes:
        begin = int(start) * self.width
        return bytes(self._bytes[begin : begin + size])


def _shared(first: bytes, second: bytes, width: int) -> int:
    """Length of the longest common prefix of two texts, in tokens."""
    pairs = zip(first, second, strict=False)
    size = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return size // width
