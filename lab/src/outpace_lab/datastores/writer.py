"""Building of a datastore, in shards that are each sorted within a given amount of memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from outpace.core import OutpaceError
from outpace.files import replacing
from outpace_lab.datastores.datastore import END
from outpace_lab.datastores.header import MOST_SHARDS, SIZE, Header, Shard, text_bytes
from outpace_lab.datastores.suffix_array import (
    MOST_BYTES,
    Bytes,
    bytes_per_token,
    sort_suffixes,
    to_bytes,
)


class DatastoreWriter:
    """Writer of a datastore; use it in a ``with`` statement.

    The file is replaced when everything is written: an error or an interrupt leaves the previous file.

    Args:
        file: the path to write to; an existing file is replaced.
        vocabulary: upper bound of the token ids, exclusive.
        memory: bytes that sorting may use. Documents that do not fit go into another shard, and longer
            documents are cut. Each shard adds a search to every look-up.
        tokenizer: name of the tokenizer, for readers.
        fingerprint: fingerprint of its vocabulary.
        sorting: called with the number of rows before a shard is sorted.

    Raises:
        OutpaceError: the memory is too small, there is nothing to write at the end, or the disk is full.
    """

    def __init__(
        self,
        file: str | Path,
        vocabulary: int,
        memory: int = 2 << 30,
        tokenizer: str = "",
        fingerprint: str = "",
        sorting: Callable[[int], None] = lambda rows: None,
    ) -> None:
        if vocabulary < 1:
            raise OutpaceError(f"the vocabulary must have at least one token, not {vocabulary}")
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.tokens = self.documents = 0
        self._file = Path(file)
        self._sorting = sorting
        self._width = bytes_per_token(vocabulary)
        # Memory per row: the text, a place of 4 bytes per byte of text, and 2 flags (`token` and `followed`).
        rows = min(memory // (5 * self._width + 2), MOST_BYTES // self._width)
        if rows < 2:
            raise OutpaceError(f"{memory} bytes of memory are too few for sorting; give more")
        # Filled from its end, so that the text is stored backwards. Unused pages take no memory.
        self._buffer: Bytes = np.empty((rows, self._width), np.uint8)
        self._free = rows
        self._whole = 0  # rows, from the end, of complete documents
        self._shards: list[Shard] = []

    def __enter__(self) -> DatastoreWriter:
        with ExitStack() as stack:
            part = stack.enter_context(replacing(self._file))
            self._out = stack.enter_context(part.open("wb"))
            self._out.write(bytes(SIZE))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            self._finish()

    @property
    def shards(self) -> int:
        return len(self._shards)

    def add(self, tokens: Sequence[int] | NDArray[np.integer], last: bool = True) -> None:
        """Append a piece to the current document, and end the document if this is its ``last`` piece.

        Raises:
            OutpaceError: a token is outside the vocabulary, or there are too many shards.
        """
        values = np.asarray(tokens) if len(tokens) else np.empty(0, np.int64)
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise OutpaceError(f"a document must be a list of token ids, not of {values.dtype}")
        outside = values[(values < 0) | (values >= self.vocabulary)]
        if len(outside):
            raise OutpaceError(f"token {outside[0]} is outside the vocabulary of {self.vocabulary}")
        self.tokens += len(values)
        rows = to_bytes(values.astype(np.int64) + 1, self._width)
        while len(rows):
            if self._free < 2:  # the last row of a shard must end a document
                self._flush()
            part = rows[: self._free - 1]
            self._push(part)
            rows = rows[len(part) :]
        if last:
            self._end()

    def _push(self, rows: Bytes) -> None:
        self._buffer[self._free - len(rows) : self._free] = rows[::-1]
        self._free -= len(rows)

    @property
    def _used(self) -> int:
        return len(self._buffer) - self._free

    def _end(self) -> None:
        """End the document, unless it is empty."""
        if self._used > self._whole:
            self._push(np.full((1, self._width), END, np.uint8))
            self._whole = self._used
            self.documents += 1

    def _flush(self) -> None:
        """Sort and write the complete documents, or the part of one if none is complete."""
        if not self._whole:
            self._push(np.full((1, self._width), END, np.uint8))
            self._whole = self._used
        if len(self._shards) == MOST_SHARDS:
            raise OutpaceError(f"more than {MOST_SHARDS} shards; give more memory, so that there are fewer")
        rest = self._used - self._whole
        self._write(self._buffer[self._free + rest :])
        self._buffer[len(self._buffer) - rest :] = self._buffer[self._free : self._free + rest].copy()
        self._free = len(self._buffer) - rest
        self._whole = 0

    def _write(self, text: Bytes) -> None:
        """Write a shard: the text, zeros up to a multiple of four bytes, the places of its suffix array.

        Places without a continuation are omitted: ends of documents, and tokens followed by one.
        """
        self._sorting(len(text))
        token: NDArray[np.bool_] = np.any(text != END, axis=1)
        followed = token.copy()
        followed[1:] &= token[:-1]  # the text is backwards: row i is followed by row i - 1
        order = (places[followed[places]].astype("<u4") for places in sort_suffixes(text))
        padding = bytes(text_bytes(len(text), self._width) - text.size)
        checksum = 0
        for part in chain((text.tobytes(), padding), (places.tobytes() for places in order)):
            checksum = zlib.crc32(part, checksum)
            self._out.write(part)
        self._shards.append(Shard(len(text), int(followed.sum()), checksum))

    def _finish(self) -> None:
        self._end()
        if self._whole:
            self._flush()
        if not self._shards:
            raise OutpaceError("there is nothing to write: the sources contain no tokens")
        header = Header(
            vocabulary=self.vocabulary,
            width=self._width,
            tokens=self.tokens,
            documents=self.documents,
            tokenizer=self.tokenizer,
            fingerprint=self.fingerprint,
            shards=tuple(self._shards),
        )
        self._out.seek(0)
        self._out.write(header.pack())
        self._out.flush()
        os.fsync(self._out.fileno())
