"""Datastore: texts on disk, searched for the continuations of another text's end.

The file is a header followed by shards, each a text and its suffix array. It is memory-mapped: processes that
open the same file share its pages. Opening it compares it with its checksums, but for the shards of a file
beyond a gigabyte, which ``verify`` alone reads whole.

The text of a shard is stored *backwards*, 0 for the end of a document and t + 1 for token t, and the text to
be continued is read backwards too. Its longest suffix that occurs is then a longest prefix, which one
bisection finds, whatever its length. No match crosses the end of a document, since 0 is never looked up, and
the suffix array omits places without a continuation.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outpace.core import OutpaceError
from outpace.files import check_plain
from outpace_lab.datastores.header import read_header
from outpace_lab.datastores.suffix_array import SuffixArray, from_bytes, key_of

END = 0  # the end of a document; token t is stored as t + 1
_AT_ONCE = 1 << 24  # bytes read at once
_WHOLE = 1 << 30  # bytes of a file that is compared with its checksums when it is opened, in about a second


@dataclass(frozen=True)
class Found:
    """The occurrences of a text's end in a datastore.

    Attributes:
        length: length of the match in tokens, 0 for none.
        count: number of its occurrences.
        continuations: tokens after the sampled occurrences, shape [samples, depth]; -1 from the end of a
            document on.
    """

    length: int
    count: int
    continuations: NDArray[np.int64]


class Datastore:
    """A datastore on disk, open for reading.

    Args:
        file: a file that ``outpace datastore build`` wrote.

    Raises:
        OutpaceError: the file is not a datastore, or it is damaged; the message gives the reason.

    Attributes:
        verified: the whole file was compared with its checksums.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        check_plain(self.file)
        try:
            with self.file.open("rb") as opened:  # opened once, since the file may be replaced at any time
                self.header = read_header(opened, self.file)
                mapped = np.memmap(opened, np.uint8, "r")
        except OSError as error:
            raise OutpaceError(f"cannot read the datastore {file}: {error.strerror}") from None
        # A plain array, since slicing a memmap makes a new memmap, which takes longer than the reading.
        self._bytes = mapped.view(np.ndarray)
        width = self.header.width
        self._shards = [
            SuffixArray(
                self._bytes[begin : begin + shard.rows * width].reshape(-1, width),
                self._bytes[order:end].view("<u4"),
            )
            for shard, (begin, order, end) in zip(self.header.shards, self.header.offsets(), strict=True)
        ]
        self.verified = False
        if self.header.file_bytes <= _WHOLE:
            self.verify()

    def look_up(
        self,
        text: Sequence[int],
        max_ngram: int = 16,
        min_ngram: int = 1,
        occurrences: int = 256,
        depth: int = 10,
    ) -> Found:
        """Continuations of the longest suffix of a text that occurs.

        Args:
            text: token ids.
            max_ngram: length of the longest suffix looked up, in tokens.
            min_ngram: length of the shortest, in tokens; shorter matches are ignored.
            occurrences: maximum number of its places read, evenly spread over all.
            depth: number of tokens read after each.
        """
        # No match can contain a token outside the datastore's vocabulary.
        known = takewhile(lambda token: token < self.header.vocabulary, reversed(text[-max_ngram:]))
        key = key_of((token + 1 for token in known), self.header.width)
        ranges = [shard.longest(key) for shard in self._shards]
        length = max(found.length for found in ranges)
        if length < min_ngram:
            return Found(0, 0, np.empty((0, depth), np.int64))
        longest = [
            (shard, found)
            for shard, found in zip(self._shards, ranges, strict=True)
            if found.length == length
        ]
        count = sum(found.last - found.first for _, found in longest)
        looked_at = min(count, occurrences)
        ranks = np.arange(looked_at) * count // looked_at
        parts = []
        for shard, found in longest:
            size = found.last - found.first
            here = ranks[(ranks >= 0) & (ranks < size)]
            places = shard.order[found.first + here]
            parts.append(_continuations(shard, places, depth, self.header.vocabulary))
            ranks = ranks - size
        return Found(length, count, np.concatenate(parts))

    def verify(self) -> None:
        """Compare the whole file with its checksums.

        Raises:
            OutpaceError: it is damaged.
        """
        for shard, (begin, _, end) in zip(self.header.shards, self.header.offsets(), strict=True):
            checksum = 0
            for start in range(begin, end, _AT_ONCE):
                checksum = zlib.crc32(self._bytes[start : min(start + _AT_ONCE, end)].data, checksum)
            if checksum != shard.checksum:
                raise OutpaceError(
                    f"{self.file} is damaged between bytes {begin} and {end}; copy it or build it again"
                )
        self.verified = True


def _continuations(
    shard: SuffixArray, places: NDArray[np.uint32], depth: int, vocabulary: int
) -> NDArray[np.int64]:
    """The tokens that follow each place, shape [places, depth], -1 from the end of a document on.

    A damaged file, which only ``verify`` detects, has places and tokens that do not exist: they end it too.
    """
    # The text is backwards: the tokens after place p are rows p - 1 to p - depth, down to row 0, an END.
    rows = places.astype(np.int64)[:, None] - np.arange(1, depth + 1)
    found = from_bytes(shard.text[np.clip(rows, 0, len(shard.text) - 1)])
    goes_on = np.logical_and.accumulate((found != END) & (found <= vocabulary), axis=1)
    return np.where(goes_on, found - 1, -1)
