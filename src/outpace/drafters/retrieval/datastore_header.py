"""The header of a datastore's file: contents, tokenizer and layout (``datastore.py`` has the rest)."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from outpace.core import OutpaceError

# As in PNG: a transfer as text, which touches line ends or the eighth bit, breaks the first bytes.
MAGIC = b"\x89OPDS\r\n\x1a"
VERSION = 1
SIZE = 65_536  # bytes before the first shard
MOST_SHARDS = 1024
_FRONT = struct.Struct("<8sIII")  # magic, version, bytes and checksum of the JSON that follows
_REBUILD = "build it again with `outpace datastore build`"


class Shard(NamedTuple):
    """A part of the file: ``rows`` tokens and ends of documents, and a suffix array of ``places`` of them.

    ``checksum`` is the CRC-32 of its bytes.
    """

    rows: int
    places: int
    checksum: int


@dataclass(frozen=True)
class Header:
    """Contents of a datastore.

    Attributes:
        vocabulary: its token ids are below this.
        width: bytes per token.
        tokens: tokens in all documents.
        documents: their number.
        tokenizer: name of the tokenizer that made the tokens; "" if they came as numbers.
        fingerprint: fingerprint of that tokenizer's vocabulary; "" if they came as numbers.
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
        """The bytes at which each shard's text begins, its suffix array begins, and the shard ends."""
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
    """A hash of a tokenizer's vocabulary: equal for two in which every token has the same id."""
    entries = "".join(f"{token}\0{number}\0" for token, number in sorted(vocabulary.items()))
    return hashlib.sha256(entries.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def text_bytes(rows: int, width: int) -> int:
    """Bytes of a shard's text, with the padding that aligns its suffix array."""
    return -(-rows * width // 4) * 4


def read_header(opened: BinaryIO, file: Path) -> Header:
    """The header of a datastore, open at its beginning.

    Raises:
        OutpaceError: the file is no datastore, of another version, damaged or cut short.
    """
    start = opened.read(SIZE)
    if not start.startswith(MAGIC):
        raise OutpaceError(f"{file} is no datastore; build one with `outpace datastore build`")
    if len(start) < SIZE:
        raise OutpaceError(f"{file} is cut short: its header ends after {len(start)} bytes; {_REBUILD}")
    _, version, length, checksum = _FRONT.unpack_from(start)
    if version != VERSION:
        raise OutpaceError(
            f"{file} has format {version}, and this outpace reads format {VERSION}; {_REBUILD}"
        )
    text = start[_FRONT.size : _FRONT.size + length]
    if zlib.crc32(text) != checksum:
        raise OutpaceError(f"{file} is damaged: its header does not match its checksum; {_REBUILD}")
    header = _parse(json.loads(text))
    size = os.fstat(opened.fileno()).st_size
    if size != header.file_bytes:
        what = "cut short" if size < header.file_bytes else "damaged"
        raise OutpaceError(
            f"{file} is {what}: it has {size} bytes and should have {header.file_bytes}; copy it again, "
            f"or {_REBUILD}"
        )
    return header


def _parse(values: dict[str, Any]) -> Header:
    return Header(**values | {"shards": tuple(Shard(*shard) for shard in values["shards"])})
