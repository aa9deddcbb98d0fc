"""One prompt of a suite, and the JSONL files that suites are read from. Imports no torch."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

from outpace.core import OutpaceError
from outpace.files import check_plain, read_line

_MOST_BYTES = 1 << 26  # of a file, uncompressed: a few kilobytes of gzip can hold gigabytes


@dataclass(frozen=True)
class Expected:
    """The right answer to a prompt.

    Attributes:
        kind: "number", "program" or "overlap".
        text: a text that ends with the number, the program's tests, or the reference.
    """

    kind: Literal["number", "program", "overlap"]
    text: str


@dataclass(frozen=True)
class Item:
    """One prompt.

    Attributes:
        turns: the user's messages. A single turn without ``chat`` is a text to continue.
        tokens: token ids, in place of turns.
        chat: the turns form a conversation, with the model's answers between them.
        references: texts that the output may repeat.
        ends: an end-of-sequence token ends the output, which is as long as the text it repeats.
        expected: the right answer, for grading; of a conversation, the first one.
    """

    id: str
    category: str
    turns: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    chat: bool = False
    references: tuple[str, ...] = ()
    ends: bool = False
    expected: Expected | None = None

    @property
    def rounds(self) -> int:
        """Number of answers."""
        return len(self.turns) or 1


@dataclass(frozen=True)
class Suite:
    """Named prompts, with their ``source`` and the number of unusable ones that were ``left_out``."""

    name: str
    items: tuple[Item, ...]
    source: str
    left_out: int = 0

    def first(self, count: int | None) -> Suite:
        """Keep at most ``count`` prompts, taken from the categories in turn; None keeps all."""
        if count is None or count >= len(self.items):
            return self
        by_category: dict[str, list[Item]] = {}
        for item in self.items:
            by_category.setdefault(item.category, []).append(item)
        spread = chain.from_iterable(zip_longest(*by_category.values()))
        kept = {item.id for item in [one for one in spread if one is not None][:count]}
        return Suite(
            self.name, tuple(item for item in self.items if item.id in kept), self.source, self.left_out
        )


def counted(prompts: int) -> str:
    return "1 prompt" if prompts == 1 else f"{prompts} prompts"


def read_values(file: Path) -> list[Any]:
    """Read the values of a JSONL file, one per line, which may be compressed with gzip.

    Raises:
        OutpaceError: it cannot be read, or a line is not JSON, or contains an unpaired surrogate.
    """
    check_plain(file)
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise OutpaceError(f"{file} has more than {_MOST_BYTES} bytes of prompts; divide it")
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise OutpaceError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError as error:
        raise OutpaceError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    values = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values.append(read_line(line))
        except OutpaceError as error:
            raise OutpaceError(f"{file}, line {number}: {error}") from None
    if not values:
        raise OutpaceError(f"{file} contains no prompt; give a file with one per line")
    return values


def read_items(file: Path, name: str) -> list[Item]:
    """Read the prompts of a JSONL file.

    A line is a string, or an object with ``prompt``, ``question``, ``turns`` (a list: a conversation) or
    ``tokens`` (a list of token ids), and optionally ``id``, ``category``, ``chat`` and ``references``.

    Raises:
        OutpaceError: the file cannot be read, or a line is not a prompt.
    """
    items = []
    for number, value in enumerate(read_values(file), start=1):
        try:
            items.append(item_of(value, f"{name}-{number}"))
        except OutpaceError as error:
            raise OutpaceError(f"{file}, prompt {number}: {error}") from None
    doubles = len(items) - len({item.id for item in items})
    if doubles:
        raise OutpaceError(f"{file}: {doubles} prompts have the id of another; give each its own, or none")
    return items


def item_of(value: Any, default: str) -> Item:
    """Make a prompt from a line's value.

    Args:
        default: the id if the line has none.

    Raises:
        OutpaceError: the value is not a prompt.
    """
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, Mapping):
        raise OutpaceError("neither a string nor an object")
    tokens, turns = value.get("tokens"), value.get("turns")
    if tokens is not None:
        if not isinstance(tokens, list) or not tokens or not all(type(one) is int for one in tokens):
            raise OutpaceError('"tokens" is not a list of token ids')
        turns = []
    elif turns is None:
        turns = [value.get("prompt", value.get("question"))]
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn for turn in turns):
        raise OutpaceError('no "prompt", "question", "turns" or "tokens" with a text in it')
    if not turns and tokens is None:
        raise OutpaceError('"turns" is empty')
    references = value.get("references", [])
    if not isinstance(references, list) or not all(isinstance(text, str) and text for text in references):
        raise OutpaceError('"references" is not a list of non-empty strings')
    return Item(
        id=str(value.get("id", default)),
        category=str(value.get("category", "all")),
        turns=tuple(turns),
        tokens=tuple(tokens or ()),
        chat=bool(value.get("chat", "turns" in value and tokens is None)),
        references=tuple(references),
    )
