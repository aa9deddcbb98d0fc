"""Files: JSON lines that a user wrote, files replaced as a whole, whose files are. Imports no torch."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError

_KINDS = [
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
]
JSON_BYTES = 1 << 22  # of a file that describes something: configs have a few thousand


def read_line(line: str) -> Any:
    """The value of a line.

    Raises:
        OutpaceError: it is not JSON, or contains an unpaired surrogate; the message does not name the place.
    """
    try:
        value = json.loads(line)
    except RecursionError:
        raise OutpaceError("not JSON that can be read: nested too deep") from None
    except ValueError as error:
        raise OutpaceError(f"not JSON: {getattr(error, 'msg', error)}") from None
    if "\\u" in line:
        check_text(json.dumps(value, ensure_ascii=False))
    return value


def check_plain(path: Path) -> None:
    """Refuse what is not a file, which may never end: a named pipe, a device, a socket, a folder.

    What does not exist passes, for the reader to report.

    Raises:
        OutpaceError: the message names what it is.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise OutpaceError(f"{path} is {kind}; give a file")


def read_json(path: Path, most: int = JSON_BYTES) -> Any:
    """The value of a JSON file.

    Args:
        most: maximum size of the file in bytes, since values take far more memory than their text.

    Raises:
        OutpaceError: it cannot be read, is too large, or is not JSON; the message names it.
    """
    check_plain(path)
    try:
        with path.open("rb") as opened:
            raw = opened.read(most + 1)
        if len(raw) > most:
            raise OutpaceError(f"{path} is larger than {most} bytes; it should have a few thousand")
        return json.loads(raw.decode("utf-8"))
    except RecursionError:
        raise OutpaceError(f"{path} is not JSON that can be read: nested too deep") from None
    except OSError as error:
        raise OutpaceError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise OutpaceError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        if isinstance(error, OutpaceError):
            raise
        raise OutpaceError(f"{path} is not JSON: {error}") from None


def check_text(text: str) -> None:
    """Refuse unpaired surrogates, which no tokenizer takes and which are not valid UTF-8.

    Raises:
        OutpaceError: the message names it.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        raise OutpaceError(
            f"{surrogate!a} is an unpaired surrogate, which is not UTF-8 text; leave it out"
        ) from None


def foreign(status: os.stat_result) -> str:
    """The reason not to trust what is in a file or a folder; empty if only this user may have written it.

    Root, who may write everywhere, counts as this user. There are no owners on Windows.
    """
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"user {status.st_uid} owns it"
    return "others may write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def beside(path: Path) -> Path:
    """The path that a file is first written to, in the same folder."""
    return path.with_name(path.name + ".part")


def replace_text(path: Path, text: str) -> None:
    """Write a file beside its path and move it there, so that a reader never sees a partial file.

    Raises:
        OutpaceError: it cannot be written.
    """
    part = beside(path)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise OutpaceError(f"cannot write {path}: {error.strerror or error}") from None
