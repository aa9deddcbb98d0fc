"""The header of a GGUF file, checked before llama.cpp reads it, which ends the process over some.

The header has counts, then keys with values, then of each tensor its name, sizes, type and place. What else
may be wrong (an unknown architecture, a missing tensor) llama.cpp refuses by itself.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outpace.core import OutpaceError

# Least and most of numbers, as in llama.cpp, by the ends of their names.
_RANGES = {
    b"block_count": (1, 512),
    b"embedding_length": (1, 1 << 24),
    b"attention.head_count": (1, 1 << 16),
    b"expert_count": (0, 512),
}
_HEADLESS = (b"mamba", b"rwkv")  # families without attention
_VOCABULARY = b"tokenizer.ggml."
_LISTS = {b"tokens": (8,), b"merges": (8,), b"scores": (6,), b"token_type": (4, 5)}  # types of their entries
_PER_TOKEN = (b"scores", b"token_type")
_SPLIT_TENSORS = b"split.tensors.count"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_LONGEST_KEY, _LONGEST_NAME = 65535, 63
_MOST_AXES = 4
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by type
_LEAST_VALUE, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes in the header
_ALIGNMENT = 32  # of tensors, unless a key says another
# Numbers in a block, and its bytes, by the type of a tensor. llama.cpp refuses types that it does not know.
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56),
    30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip


class _Wrong(Exception):
    """What is wrong with a header."""


def check_header(path: Path) -> None:
    """Refuse a file whose header is not one: cut off, with counts, types or places that cannot be.

    Raises:
        OutpaceError: the message names the first fault.
    """
    try:
        if not path.stat().st_size:  # which cannot be mapped
            raise _Wrong("it is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()
    except _Wrong as error:
        raise OutpaceError(f"{path} is truncated or damaged; fetch it again ({error})") from None
    except OSError as error:
        raise OutpaceError(f"cannot read {path}: {error.strerror or error}") from None


class JoinedHeader(NamedTuple):
    """The header of a file, or of all parts of a split one, without the lists of its vocabulary.

    Attributes:
        head: the header, filled up to where tensors begin.
        size: of a file with it and the tensors of all parts, one part after the other.
        places: of each part, where its tensors begin in that file, and in its own.
        vocabulary: its tokens.
    """

    head: bytes
    size: int
    places: list[tuple[int, int]]
    vocabulary: int


def joined(paths: Sequence[Path]) -> JoinedHeader:
    """The header of a checked file, or of the parts of a split one, of which the first has the values.

    Raises:
        OutpaceError: the parts are not those of one file.
    """
    values, infos, places, tensors, wanted, vocabulary = b"", list[bytes](), list[tuple[int, int]](), 0, 0, 0
    end = alignment = version = count = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            own = _Header(data).parts(end)
        if not places:
            version, count, values, vocabulary = own.version, own.kept, own.values, own.vocabulary
            alignment, wanted = own.alignment, own.wanted
        infos.append(own.infos)
        tensors += own.tensors
        places.append((end, own.begin))
        end += -(-(path.stat().st_size - own.begin) // alignment) * alignment
    if len(paths) > 1 and tensors != wanted:
        raise OutpaceError(
            f"the parts of {paths[0]} have {tensors} tensors, and it has {wanted}; fetch them again"
        )
    head = struct.pack("<4sIQQ", b"GGUF", version, tensors, count) + values + b"".join(infos)
    head += bytes(-len(head) % alignment)
    return JoinedHeader(
        head, len(head) + end, [(len(head) + start, begin) for start, begin in places], vocabulary
    )


class _Value(NamedTuple):
    """A value's type; a 32-bit number itself; of an array the type of its entries and their number."""

    kind: int
    number: int = 0
    inner: int | None = None
    entries: int = 0


class _Tensor(NamedTuple):
    name: str
    start: int
    size: int | None  # None for a type that is not known here


class _Parts(NamedTuple):
    """Pieces of a header, as ``joined`` puts them together.

    Attributes:
        kept: number of the values.
        tensors: their number, in this file.
        infos: what is said of tensors.
        begin: where tensors begin.
        wanted: number of the tensors of all parts of a split file, if it says one.
        vocabulary: tokens of the lists that are left out.
    """

    version: int
    kept: int
    tensors: int
    values: bytes
    infos: bytes
    begin: int
    alignment: int
    wanted: int
    vocabulary: int


class _Header:
    """A header, read from its beginning.

    Args:
        data: the file.
    """

    def __init__(self, data: Any) -> None:
        self._data, self._size, self._at = data, len(data), 4  # after the magic

    def check(self) -> None:
        if self._data[:4] != _MAGIC:
            raise _Wrong("it does not begin with the letters GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise _Wrong(f"its version is {version}")
        tensors, values = self._number("<Q"), self._number("<Q")
        left = self._size - self._at
        for count, least, what in ((values, _LEAST_VALUE, "values"), (tensors, _LEAST_TENSOR, "tensors")):
            if count * least > left:
                raise _Wrong(f"it has {left} bytes for {count} {what}")
        found: dict[bytes, _Value] = {}
        for _ in range(values):
            key, value = self._value()
            if key in found:
                raise _Wrong(f"two of its values are named {_shown(key)}")
            found[key] = value
        alignment = _checked_alignment(found.get(b"general.alignment"))
        _check_numbers(found)
        _check_vocabulary(found)
        self._check_places([self._tensor(alignment) for _ in range(tensors)], alignment)

    def parts(self, moved: int) -> _Parts:
        """The header in pieces, without the vocabulary; tensors are moved by some bytes."""
        version = self._number("<I")
        tensors, values = self._number("<Q"), self._number("<Q")
        kept, found, wanted = list[bytes](), dict[bytes, _Value](), 0
        for _ in range(values):
            begin = self._at
            key, value = self._value()
            found[key] = value
            if value.inner is None or not key.startswith(_VOCABULARY):
                kept.append(bytes(self._data[begin : self._at]))
            if key == _SPLIT_TENSORS and _SIZES.get(value.kind) == 4:
                wanted = int.from_bytes(self._data[self._at - 4 : self._at], "little")
        alignment, infos = _checked_alignment(found.get(b"general.alignment")), b""
        for _ in range(tensors):
            begin = self._at
            tensor = self._tensor(alignment)
            infos += bytes(self._data[begin : self._at - 8]) + struct.pack("<Q", tensor.start + moved)
        begin = -(-self._at // alignment) * alignment
        tokens = found.get(_VOCABULARY + b"tokens", _Value(_STRING)).entries
        return _Parts(version, len(kept), tensors, b"".join(kept), infos, begin, alignment, wanted, tokens)

    def _value(self) -> tuple[bytes, _Value]:
        key = self._string(_LONGEST_KEY, "the name of a value")
        kind = self._number("<I")
        if kind == _UINT32:
            return key, _Value(kind, number=self._number("<I"))
        if kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _SIZES:
                self._forward(_SIZES[inner] * count, key)
            elif inner == _STRING:
                self._skip_strings(count, key)
            else:
                raise _Wrong(f"{_shown(key)} is an array of type {inner}")
            return key, _Value(kind, inner=inner, entries=count)
        if kind != _STRING and kind not in _SIZES:
            raise _Wrong(f"{_shown(key)} has type {kind}")
        self._forward(self._number("<Q") if kind == _STRING else _SIZES[kind], key)
        return key, _Value(kind)

    def _skip_strings(self, count: int, key: bytes) -> None:
        """Skip an array of strings, as fast as can be: a vocabulary has hundreds of thousands."""
        if 8 * count > self._size - self._at:
            raise _Wrong(f"{_shown(key)} has {count} entries, more than the file has room for")
        unpack, data, at, last = struct.Struct("<Q").unpack_from, self._data, self._at, self._size - 8
        for _ in range(count):
            if at > last:
                raise _Wrong(f"it ends in {_shown(key)}")
            at += 8 + unpack(data, at)[0]
        self._at = at
        self._forward(0, key)

    def _tensor(self, alignment: int) -> _Tensor:
        name = _shown(self._string(_LONGEST_NAME, "the name of a tensor"))
        axes = self._number("<I")
        if not 1 <= axes <= _MOST_AXES:
            raise _Wrong(f"{name} has {axes} axes")
        shape = [self._number("<Q") for _ in range(axes)]
        kind, start = self._number("<I"), self._number("<Q")
        if 0 in shape or math.prod(shape) >= 1 << 62:
            raise _Wrong(f"{name} has sizes {shape}")
        if start % alignment:
            raise _Wrong(f"{name} begins at {start}, no multiple of {alignment}")
        if kind not in BLOCKS:
            return _Tensor(name, start, None)
        numbers, bytes_each = BLOCKS[kind]
        if shape[0] % numbers:
            raise _Wrong(f"{name} has rows of {shape[0]} numbers, and its type blocks of {numbers}")
        return _Tensor(name, start, math.prod(shape) // numbers * bytes_each)

    def _check_places(self, tensors: list[_Tensor], alignment: int) -> None:
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise _Wrong("two of its tensors have one name")
        begin = -(-self._at // alignment) * alignment
        end, before = 0, ""
        for tensor in sorted(tensors, key=lambda one: one.start):
            if tensor.start < end:
                raise _Wrong(f"{tensor.name} overlaps {before}")
            end, before = tensor.start + (tensor.size or 0), tensor.name
            if begin + end > self._size:
                raise _Wrong(f"{tensor.name} ends at byte {begin + end} of {self._size}")

    def _string(self, most: int, what: str) -> bytes:
        length = self._number("<Q")
        if not 1 <= length <= most:
            raise _Wrong(f"{what} has {length} bytes")
        start = self._at
        self._forward(length, what.encode())
        return bytes(self._data[start : start + length])

    def _forward(self, count: int, key: bytes) -> None:
        self._at += count
        if self._at > self._size:
            raise _Wrong(f"it ends in {_shown(key)}")

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        if self._at + size > self._size:
            raise _Wrong("it ends in its header")
        value: int = struct.unpack_from(form, self._data, self._at)[0]
        self._at += size
        return value


def _checked_alignment(value: _Value | None) -> int:
    if value is None:
        return _ALIGNMENT
    if value.kind != _UINT32 or not value.number or value.number & (value.number - 1):
        raise _Wrong(f"its alignment is {value.number}, no power of two")
    return value.number


def _check_numbers(found: Mapping[bytes, _Value]) -> None:
    """Refuse numbers by which llama.cpp divides, or that it asserts."""
    for key, value in found.items():
        name = next((name for name in _RANGES if key.endswith(b"." + name)), None)
        if name is not None and value.kind == _UINT32:
            least, most = _RANGES[name]
            least = 0 if key.startswith(_HEADLESS) else least
            if not least <= value.number <= most:
                raise _Wrong(f"its {name.decode()} is {value.number}, and llama.cpp takes {least} to {most}")


def _check_vocabulary(found: Mapping[bytes, _Value]) -> None:
    """Refuse lists of a vocabulary that are none, or shorter than it, since llama.cpp reads them unseen."""
    tokens = found.get(_VOCABULARY + b"tokens")
    for name, kinds in _LISTS.items():
        value = found.get(_VOCABULARY + name)
        if value is None:
            continue
        if value.inner not in kinds:
            raise _Wrong(f"{_shown(_VOCABULARY + name)} is no list of its type")
        if name in _PER_TOKEN and (tokens is None or value.entries != tokens.entries):
            raise _Wrong(
                f"it has {value.entries} {name.decode()} for {tokens.entries if tokens else 0} tokens"
            )


def _shown(name: bytes) -> str:
    return ascii(name.decode("utf-8", "replace"))[1:-1][:80]
