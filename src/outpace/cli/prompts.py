"""Prompts from an option, a text file, standard input, or a JSONL file. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outpace.bench.items import item_of
from outpace.core import OutpaceError
from outpace.files import check_plain, read_line

LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class PromptLine:
    """A prompt and its origin; ``line`` is its line in a JSONL file, from 1, otherwise None.

    ``references`` are texts that its output may repeat.
    """

    text: str
    line: int | None = None
    references: tuple[str, ...] = ()

    def where(self, message: str) -> str:
        """The message, preceded by the line if there is one."""
        return message if self.line is None else f"line {self.line}: {message}"


def is_list(file: Path | None) -> bool:
    """True if a file contains one prompt per line."""
    return file is not None and file.suffix.lower() in LINES


def read(prompt: str | None, file: Path | None, references: Sequence[Path] = ()) -> list[PromptLine]:
    """Read the prompts: all of a JSONL file, otherwise one.

    Args:
        references: files whose texts are references of every prompt.

    Raises:
        OutpaceError: no prompt, two sources, an empty prompt, an invalid line, or an empty reference.
    """
    shared = tuple(_reference(path) for path in references)
    return [replace(one, references=one.references + shared) for one in _read(prompt, file)]


def _read(prompt: str | None, file: Path | None) -> list[PromptLine]:
    if prompt is not None and file is not None:
        raise OutpaceError("give --prompt or --file, not both")
    if file is not None:
        text = read_text(file)
        if is_list(file):
            return read_lines(text, str(file))
        text = _without_last_break(text)
    elif prompt is not None:
        text = prompt
    else:
        text = _stdin()
    if not text:
        raise OutpaceError("the prompt is empty; give --prompt TEXT or --file FILE, or pipe text in")
    return [PromptLine(text)]


def read_lines(text: str, name: str) -> list[PromptLine]:
    """The prompts of a JSONL text, one per line; empty lines are skipped.

    A line is a JSON string, or an object with ``prompt``, ``question`` or ``turns`` (the first one is used)
    and, if there are any, ``references``, a list of texts.
    """
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(read_line(line), number))
        except OutpaceError as error:
            raise OutpaceError(f"{name}, line {number}: {error}: {_short(line)}") from None
    if not prompts:
        raise OutpaceError(f"{name} contains no prompt")
    return prompts


def _prompt(value: object, number: int) -> PromptLine:
    """The prompt in a line's value."""
    if isinstance(value, dict) and "tokens" in value:
        value = {name: part for name, part in value.items() if name != "tokens"}
        if not value.keys() & {"prompt", "question", "turns"}:
            raise OutpaceError('only `outpace bench` takes "tokens"; give a text as "prompt"')
    item = item_of(value, "")
    return PromptLine(item.turns[0], number, item.references)


def _reference(file: Path) -> str:
    text = _without_last_break(read_text(file))
    if not text:
        raise OutpaceError(f"the reference {file} is empty")
    return text


def read_text(file: Path) -> str:
    """The text of a file that a user names.

    Raises:
        OutpaceError: it cannot be read, or is not UTF-8.
    """
    check_plain(file)
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OutpaceError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise OutpaceError(f"cannot read {file}: {error.strerror}") from None


def _stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise OutpaceError("no prompt; give --prompt TEXT or --file FILE, or pipe text in")
    try:
        return _without_last_break(sys.stdin.read())
    except UnicodeDecodeError as error:
        raise OutpaceError(
            f"standard input is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def _without_last_break(text: str) -> str:
    """The text without the final line break that editors and echo add."""
    return text.removesuffix("\n").removesuffix("\r")


def _short(line: str) -> str:
    return line if len(line) <= 60 else line[:57] + "..."
