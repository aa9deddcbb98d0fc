"""Files: JSON lines that a user wrote, files replaced as a whole and read as written, whose files are.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
_DIGEST = "digest"
_OPEN = "others may write to it"
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


def why_foreign(status: os.stat_result) -> str | None:
    """The reason not to trust what is in a file or a folder; None if only this user may have written it.

    Root, who may write everywhere, counts as this user. There are no owners on Windows.
    """
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"user {status.st_uid} owns it"
    return _OPEN if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def why_reachable(folder: Path) -> str | None:
    """The reason why another user may put something else in a folder's place; None if nobody may.

    Where everybody may write but remove only what is theirs, as in /tmp, a folder keeps its place.
    """
    for above in folder.parents:
        status = above.stat()
        why = why_foreign(status)
        if why and not (why == _OPEN and status.st_mode & stat.S_ISVTX):
            return f"of {above} above it: {why}"
    return None


def beside(path: Path) -> Path:
    """A path that a file is first written to, in the same folder.

    It is another one at each call: processes in two containers may have the same number.
    """
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """The path to write a file to, which then replaces another as a whole, or is removed after an error.

    A reader never sees a part of it, also if a disk is full.

    Args:
        mode: what others may do with it, as far as the process's mask lets them.

    Raises:
        OutpaceError: it cannot be written.
    """
    part = beside(path)
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        yield part
        part.replace(path)
    except OSError as error:
        if error.filename not in (None, part, str(part)):  # another file, which its writer has read
            raise
        raise OutpaceError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text to a file, as a whole.

    Raises:
        OutpaceError: it cannot be written.
    """
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


# -- digests: what is read back is what was written ------------------------------------------------------


def digest_of(*parts: Any) -> str:
    """A digest of bytes, or of buffers of them."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def sealed(value: Mapping[str, Any], *more: Any) -> dict[str, Any]:
    """A JSON object with a digest of its other fields, and of further parts that are not in it."""
    own = {name: part for name, part in value.items() if name != _DIGEST}
    return {**own, _DIGEST: digest_of(_canonical(own), *more)}


def unsealed(path: Path, value: Any, *more: Any) -> dict[str, Any]:
    """An object that ``sealed`` made, without its digest.

    Args:
        path: the file that it was read from, for the error.

    Raises:
        OutpaceError: it is not what was written.
    """
    if not isinstance(value, dict) or not isinstance(value.get(_DIGEST), str):
        raise OutpaceError(f"{path} is damaged: it has no digest")
    rest = {name: one for name, one in value.items() if name != _DIGEST}
    if digest_of(_canonical(rest), *more) != value[_DIGEST]:
        raise OutpaceError(f"{path} is damaged: it is not what was written")
    return rest


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
