"""Writing of results to standard output or a file as they come. Imports no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from outpace.cli import screen
from outpace.core import OutpaceError
from outpace.files import replace_text

STANDARD_OUTPUT = "-"


def check_out(file: Path, overwrite: bool, remedy: str = "give another --out, or --overwrite") -> None:
    """Refuse a file that cannot be written, or that would be lost.

    Raises:
        OutpaceError: the file cannot be written, or is not empty.
    """
    if file.is_dir() or not file.parent.is_dir():
        why = "a folder" if file.is_dir() else f"no such folder: {file.parent}"
        raise OutpaceError(f"cannot write {file}: {why}")
    if file.is_file() and file.stat().st_size and not overwrite:
        raise OutpaceError(f"{file} exists and would be lost; {remedy}")
    if file.exists() and not file.is_file():
        return  # a device or a pipe: opening it might be seen at its other end
    new = not file.exists()
    try:
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        raise OutpaceError(f"cannot write {file}: {error.strerror or error}") from None


def check_json(to_json: str | None) -> None:
    """Refuse a file for results that cannot be written, before anything is measured.

    Raises:
        OutpaceError: it cannot be written.
    """
    if to_json is not None and to_json != STANDARD_OUTPUT:
        check_out(Path(to_json), overwrite=True)


def write_json(text: str, to_json: str | None) -> None:
    if to_json == STANDARD_OUTPUT:
        screen.write(text + "\n")
    elif to_json is not None:
        path = Path(to_json)
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_text(text + "\n", encoding="utf-8")
        else:
            replace_text(path, text + "\n")


class ResultWriter:
    """Writer of results as they come: text, or one JSON object per line, to a file or standard output.

    Args:
        file: the file; None is standard output.
        as_json: whether results are JSON; read by the callers.
        overwrite: whether a non-empty file may be replaced.

    Raises:
        OutpaceError: the file cannot be written, or holds something already.
    """

    def __init__(self, file: Path | None, as_json: bool = False, overwrite: bool = False) -> None:
        self.as_json = as_json
        self.started = False
        self._file = file
        self._opened: TextIO | None = None
        if file is not None:
            check_out(file, overwrite)

    def write(self, text: str) -> None:
        """Write and flush, so that finished results are safe from later errors."""
        self.started = True
        if self._file is None:
            screen.write(text)
            return
        try:
            if self._opened is None:
                # Opened at the first write, so that an earlier error leaves the old file intact.
                self._opened = self._file.open("w", encoding="utf-8")
            self._opened.write(text)
            self._opened.flush()
        except BrokenPipeError:
            raise  # the reader of a pipe has closed it
        except OSError as error:
            self._opened = None  # or closing it would try again
            raise OutpaceError(f"cannot write {self._file}: {error.strerror or error}") from None

    def json(self, value: dict[str, Any]) -> None:
        self.write(json.dumps(value, ensure_ascii=self._ascii) + "\n")

    @property
    def _ascii(self) -> bool:
        encoding = "utf-8" if self._file is not None else (sys.stdout.encoding or "")
        return not encoding.lower().startswith("utf")

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
