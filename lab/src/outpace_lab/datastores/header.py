"""Header of a datastore's file: contents, tokenizer and layout (``datastore.py`` describes the rest)."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from outpace.core import OutpaceError
from outpace_lab.datastores.suffix_array import bytes_per_token

# As in PNG: a transfer as text, which changes line ends or the eighth bit, corrupts the first bytes.
MAGIC = b"\x89OPDS\r\n\x1a"
VERSION = 1
SIZE = 65_536  # bytes before the first shard
MOST_SHARDS = 1024
_MOST = 1 << 60  # of any number
_FRONT = struct.Struct("<8sIII")  # magic, version, bytes and checksum of the JSON that follows
_REBUILD = "build it again with `outpace datastore build`"


class Shard(NamedTuple):
    """A part of the file: ``rows`` tokens and document ends, and a suffix array with ``places`` entries.

    ``checksum`` is the CRC-32 of its bytes.
    """

    rows: int
    places: int
    checksum: int


@dataclass(frozen=True)
class Header:
    """Contents of a datastore.

    Attributes:
        vocabulary: upper bound of the token ids, exclusive.
        width: bytes per token.
        tokens: number of tokens in all documents.
        documents: number of documents.
        tokenizer: name of the tokenizer; "" if the texts were given as token ids.
        fingerprint: fingerprint of its vocabulary; "" if the texts were given as token ids.
        shards: the parts of the file, in order.
    """

    vocabulary: int
    width: int
    tokens: int
    documents: int
    tokenizer: str
    fingerprint: str
    shards: tuple[Shard, ...]

    def offsets(self) -> list[tuple[int, int, int]]:
        """Byte offsets, per shard, of its text, its suffix array and its end."""
        found, begin = [], SIZE
        for shard in self.shards:
            order = begin + text_bytes(shard.rows, self.width)
            end = order + 4 * shard.places
            found.append((begin, order, end))
            begin = end
        return found

    @property
    def file_bytes(self) -> int:
        return self.offsets()[-1][2] if self.shards else SIZE

    def pack(self) -> bytes:
        """The first ``SIZE`` bytes of the file."""
        text = json.dumps(asdict(self)).encode()
        front = _FRONT.pack(MAGIC, VERSION, len(text), zlib.crc32(text))
        if len(front) + len(text) > SIZE:
            raise OutpaceError("the tokenizer's name is too long for a datastore; use a shorter path")
        return (front + text).ljust(SIZE, b"\0")


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """A hash of a tokenizer's vocabulary, equal for tokenizers in which every token has the same id."""
    entries = "".join(f"{token}\0{number}\0" for token, number in sorted(vocabulary.items()))
    return hashlib.sha256(entries.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def text_bytes(rows: int, width: int) -> int:
    """Bytes of a shard's text, with the padding that aligns its suffix array."""
    return -(-rows * width // 4) * 4


def _header(text: bytes) -> Header | None:
    """The header in a JSON text; None if a field is missing, of another type or out of its range."""
    try:
        values = json.loads(text)
        header = Header(**values | {"shards": tuple(Shard(*shard) for shard in values["shards"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = [header.vocabulary, header.width, header.tokens, header.documents]
    numbers += [number for shard in header.shards for number in shard]
    texts = isinstance(header.tokenizer, str) and isinstance(header.fingerprint, str)
    if not texts or not all(type(number) is int and 0 <= number < _MOST for number in numbers):
        return None
    fits = header.vocabulary >= 1 and header.width == bytes_per_token(header.vocabulary)
    shards = 1 <= len(header.shards) <= MOST_SHARDS
    whole = all(shard.rows > 0 and shard.places <= shard.rows for shard in header.shards)
    return header if fits and shards and whole else None


def read_header(opened: BinaryIO, file: Path) -> Header:
    """Read the header from the beginning of an open datastore.

    Raises:
        OutpaceError: the file is not a datastore, has another version, or is damaged or truncated.
    """
    start = opened.read(SIZE)
    if not start.startswith(MAGIC):
        raise OutpaceError(f"{file} is not a datastore; build one with `outpace datastore build`")
    if len(start) < SIZE:
        raise OutpaceError(f"{file} is truncated: its header ends after {len(start)} bytes; {_REBUILD}")
    _, version, length, checksum = _FRONT.unpack_from(start)
    if version != VERSION:
        raise OutpaceError(
            f"{file} has format {version}, and this version of outpace reads format {VERSION}; {_REBUILD}"
        )
    text = start[_FRONT.size : _FRONT.size + length]
    if zlib.crc32(text) != checksum:
        raise OutpaceError(f"{file} is damaged: its header does not match its checksum; {_REBUILD}")
    header = _header(text)
    if header is None:
        raise OutpaceError(f"{file} is damaged: its header describes no datastore; {_REBUILD}")
    size = os.fstat(opened.fileno()).st_size
    if size != header.file_bytes:
        what = "truncated" if size < header.file_bytes else "damaged"
        raise OutpaceError(
            f"{file} is {what}: it has {size} bytes and should have {header.file_bytes}; copy it again, "
            f"or {_REBUILD}"
        )
    return header
