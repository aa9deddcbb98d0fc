"""Texts and token ids from files and folders, read piece by piece. Imports no torch."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.prompts import LINES
from outpace.core import OutpaceError
from outpace.files import check_plain, read_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARRAYS = (".npy",)
_LETTERS = 1 << 20  # characters of a text read at once, up to the end of the line
_TOKENS = 1 << 20
_SNIFFED = 8192


@dataclass(frozen=True)
class Piece:
    """Text or token ids; ``last`` ends a document, ``size`` is the number of bytes read for it."""

    content: str | list[int] | NDArray[np.integer]
    last: bool
    size: int


def find(sources: list[Path]) -> tuple[list[Path], list[Path]]:
    """The files of the sources, and the skipped ones: files in folders that are not text.

    Hidden files and folders are ignored.

    Raises:
        OutpaceError: a source does not exist, or all are empty.
    """
    files: list[Path] = []
    passed: list[Path] = []
    for source in sources:
        if source.is_dir():
            for file in sorted(source.rglob("*")):
                inside = file.relative_to(source)
                if file.is_file() and not any(part.startswith(".") for part in inside.parts):
                    (files if file.suffix.lower() in ARRAYS or _is_text(file) else passed).append(file)
        elif source.exists():
            check_plain(source)
            files.append(source)
        else:
            raise OutpaceError(f"no such file or folder: {source}")
    if not files:
        raise OutpaceError(
            f"there is no text in {', '.join(map(str, sources))}; give files, or folders of files"
        )
    return files, passed


def _is_text(file: Path) -> bool:
    """True if a file begins with UTF-8 text."""
    with file.open("rb") as opened:
        start = opened.read(_SNIFFED)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


def read(file: Path, field: str, end: int | None) -> Iterator[Piece]:
    """Read the documents of a file: an array of token ids, a JSONL file with one per line, or one text.

    Args:
        field: the field of a JSONL file's objects that contains the text or the token ids.
        end: the token that ends a document in an array; None if the array, or each of its rows, is one.

    Raises:
        OutpaceError: the file does not have the format of its name.
    """
    try:
        if file.suffix.lower() in ARRAYS:
            yield from _array(file, end)
        elif file.suffix.lower() in LINES:
            yield from _lines(file, field)
        else:
            yield from _text(file)
    except UnicodeDecodeError as error:
        raise OutpaceError(
            f"{file} is not UTF-8 text: {error.reason} at byte {error.start}; leave it out, or convert it"
        ) from None
    except OSError as error:
        raise OutpaceError(f"cannot read {file}: {error.strerror or error}") from None


def _text(file: Path) -> Iterator[Piece]:
    with file.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as opened:
        read, text = 0, ""
        while True:
            before, text = text, opened.read(_LETTERS) + opened.readline(_LETTERS)
            if before:
                done = raw.tell()
                yield Piece(before, last=not text, size=done - read)
                read = done
            if not text:
                return


def _lines(file: Path, field: str) -> Iterator[Piece]:
    with file.open("rb") as opened:
        for number, line in enumerate(opened, start=1):
            if not line.strip():
                continue
            try:
                content = _content(read_line(line.decode("utf-8-sig")), field)
            except OutpaceError as error:
                raise OutpaceError(f"{file}, line {number}: {error}") from None
            yield Piece(content, last=True, size=len(line))


def _content(value: Any, field: str) -> str | list[int]:
    """The text or the token ids in a line's value."""
    if isinstance(value, dict):
        if field not in value:
            raise OutpaceError(f"no {field!r}; name the field that contains the text with --field")
        value = value[field]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise OutpaceError("neither a text nor a list of token ids")


def _array(file: Path, end: int | None) -> Iterator[Piece]:
    import numpy as np

    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise OutpaceError(f"{file} is not an array of token ids: {error}") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise OutpaceError(
            f"{file} is not an array of token ids: it is {array.dtype} of shape {array.shape}; save whole "
            "numbers, one text or one text per row"
        )
    for row in np.atleast_2d(array):
        for start in range(0, len(row), _TOKENS):
            tokens = row[start : start + _TOKENS]
            ends = np.flatnonzero(tokens == end) + 1 if end is not None else np.empty(0, np.int64)
            parts = [part for part in np.split(tokens, ends) if len(part)]
            for part in parts:
                whole = end is not None and part[-1] == end
                last = whole or (part is parts[-1] and start + _TOKENS >= len(row))
                yield Piece(part, last, part.nbytes)
