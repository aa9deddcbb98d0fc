"""The number of layers in a GGUF file's header, read first: llama.cpp ends the process over a wrong one.

Whatever else is wrong in a header, llama.cpp refuses by itself.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from outpace.core import OutpaceError

MOST_LAYERS = 512  # as in llama.cpp
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by type


def check_layers(path: Path) -> None:
    """Refuse a number of layers for which llama.cpp would end the process.

    Raises:
        OutpaceError: the message names it.
    """
    with path.open("rb") as file:
        try:
            layers = _layers(file, path.stat().st_size)
        except (struct.error, KeyError, OSError):
            return  # truncated, of an unknown type, or a length beyond any file: llama.cpp refuses it
    if layers is not None and not 1 <= layers <= MOST_LAYERS:
        raise OutpaceError(
            f"{path} is damaged: its block_count is {layers}, and llama.cpp takes 1 to {MOST_LAYERS} layers; "
            "fetch it again"
        )


def _layers(file: BinaryIO, size: int) -> int | None:
    """The block_count; None if the header has none."""
    file.seek(16)  # after the magic, the version and the number of tensors
    for _ in range(min(_number(file, "<Q"), size)):
        key = file.read(min(_number(file, "<Q"), size))
        kind = _number(file, "<I")
        if key.endswith(b".block_count") and kind == _UINT32:
            return _number(file, "<I")
        _skip(file, kind)
    return None


def _skip(file: BinaryIO, kind: int) -> None:
    """Skip a value. A length beyond the end of the file ends the reading there."""
    if kind == _STRING:
        _forward(file, _number(file, "<Q"))
    elif kind == _ARRAY:
        inner, count = _number(file, "<I"), _number(file, "<Q")
        if inner in _SIZES:
            _forward(file, _SIZES[inner] * count)
        elif inner == _STRING:
            for _ in range(count):
                _forward(file, _number(file, "<Q"))
        else:
            raise KeyError(inner)  # arrays of arrays, which llama.cpp refuses
    else:
        _forward(file, _SIZES[kind])


def _forward(file: BinaryIO, count: int) -> None:
    file.seek(min(count, 1 << 48), 1)


def _number(file: BinaryIO, form: str) -> int:
    value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
    return value
