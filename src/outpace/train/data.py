"""Texts to learn from: documents of JSONL files, a held-out split, and rows of documents packed together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from outpace.core import OutpaceError
from outpace.files import read_line

LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Document:
    """A text as token ids.

    Attributes:
        prompt: its first so many tokens are not to be learnt.
        open: there is nothing after them yet: an answer is wanted.
    """

    tokens: tuple[int, ...]
    prompt: int = 0
    open: bool = False

    @property
    def digest(self) -> bytes:
        """Of its prompt, or of the text where there is none: answers of one prompt stay together."""
        content = self.tokens[: self.prompt] or self.tokens
        return hashlib.sha256(json.dumps(list(content)).encode()).digest()

    @property
    def asked(self) -> tuple[int, ...]:
        """What another's words may follow: its prompt, or the first half of a text without one."""
        return self.tokens[: self.prompt or len(self.tokens) // 2]


class Encoder(Protocol):
    """How a model's tokenizer is used."""

    def tokens(self, text: str) -> list[int]: ...

    def plain_tokens(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Seq[dict[str, str]]) -> list[int]: ...


def read(source: str | Path, encoder: Encoder, chat: bool = False) -> list[Document]:
    """The documents of a JSONL file, or of all of a folder, in the order of their names.

    A line is a text, or an object with ``text``; with ``prompt`` or ``question`` and, where it is there,
    ``response`` or ``answer``; with ``messages``, a chat, whose last turn is learnt if it is the assistant's;
    or with ``tokens`` and ``prompt_length``, as ``write`` writes them.

    Args:
        chat: prompts are turns of a chat.

    Raises:
        OutpaceError: no such file, no line in any, or one that cannot be read; the message names it.
    """
    path = Path(source)
    files = sorted(file for file in path.rglob("*") if file.suffix in LINES) if path.is_dir() else [path]
    found = [one for file in files for one in _read(file, encoder, chat)]
    if not found:
        raise OutpaceError(f"there is no document in {source}; give a JSONL file, or a folder of them")
    return found


def _read(file: Path, encoder: Encoder, chat: bool) -> Iterator[Document]:
    try:
        lines = file.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OutpaceError(f"cannot read {file}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield parse(read_line(line), encoder, chat)
        except OutpaceError as error:
            raise OutpaceError(f"{file}, line {number}: {error}") from None


def parse(value: Any, encoder: Encoder, chat: bool = False) -> Document:
    """The document in a line of JSONL, as ``read`` describes it.

    Raises:
        OutpaceError: there is none; the message does not say where.
    """
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise OutpaceError("neither a text nor an object")
    if "tokens" in value:
        tokens = value["tokens"]
        if not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
            raise OutpaceError('"tokens" is not a list of token ids')
        prompt = value.get("prompt_length", 0)
        if type(prompt) is not int or not 0 <= prompt <= len(tokens):
            raise OutpaceError(f'"prompt_length" is not a number from 0 to {len(tokens)}')
        return _checked(tokens, prompt)
    if "text" in value:
        return _checked(encoder.tokens(_string(value, "text")), 0)
    if "messages" in value:
        return _chat(value["messages"], encoder)
    for name in ("prompt", "question"):
        if name in value:
            text = _string(value, name)
            prompt = (
                encoder.encode_chat([{"role": "user", "content": text}]) if chat else encoder.tokens(text)
            )
            answer = next((_string(value, key) for key in ("response", "answer") if key in value), None)
            return _answered(prompt, answer, encoder)
    raise OutpaceError('no "text", "prompt", "question", "messages" or "tokens"')


def _chat(messages: Any, encoder: Encoder) -> Document:
    if not isinstance(messages, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("content"), str) and isinstance(turn.get("role"), str)
        for turn in messages
    ):
        raise OutpaceError('"messages" is not a list of objects with "role" and "content"')
    answered = bool(messages) and messages[-1]["role"] == "assistant"
    before = messages[:-1] if answered else messages
    if not before:
        raise OutpaceError('"messages" holds no turn of a user')
    return _answered(encoder.encode_chat(before), messages[-1]["content"] if answered else None, encoder)


def _answered(prompt: list[int], answer: str | None, encoder: Encoder) -> Document:
    if answer is None:
        return _checked(prompt, len(prompt), open=True)
    return _checked([*prompt, *encoder.plain_tokens(answer)], len(prompt))


def _string(value: dict[str, Any], name: str) -> str:
    if not isinstance(value[name], str):
        raise OutpaceError(f'"{name}" is not a string')
    return str(value[name])


def _checked(tokens: Seq[int], prompt: int, open: bool = False) -> Document:
    if not tokens:
        raise OutpaceError("the text is empty")
    return Document(tuple(tokens), prompt, open)


def write(documents: Seq[Document], file: Path, append: bool = False) -> None:
    """Documents as token ids, for ``read``."""
    lines = (json.dumps({"tokens": d.tokens, "prompt_length": d.prompt}) + "\n" for d in documents)
    with file.open("a" if append else "w", encoding="utf-8") as opened:
        opened.writelines(lines)


@dataclass(frozen=True)
class Split:
    """Documents by what they are for.

    Attributes:
        learnt: those trained on.
        calibration: what a drafter measures its heads on; may be empty.
        held_out: those that are reported on.
    """

    learnt: list[Document]
    calibration: list[Document]
    held_out: list[Document]


def split(documents: Seq[Document], share: float) -> Split:
    """Documents to learn from, about this share of all held out, and half as many for calibration.

    Which are which depends on each alone, by a hash: the same ones whatever else is in the data.

    Raises:
        OutpaceError: none to learn from, or none held out.
    """
    found = Split([], [], [])
    for document in documents:
        place = int.from_bytes(document.digest[:8], "big") / 2**64
        if place < share:
            found.held_out.append(document)
        elif place < 1.5 * share:
            found.calibration.append(document)
        else:
            found.learnt.append(document)
    if not (found.learnt and found.held_out):
        raise OutpaceError(
            f"{len(documents)} documents, of which a share of {share} is to be held out, leave one side "
            "empty; give more documents, or another share"
        )
    return found


def digest(documents: Seq[Document]) -> str:
    """SHA-256 of all documents, in their order."""
    total = hashlib.sha256()
    for document in documents:
        total.update(json.dumps([document.prompt, *document.tokens]).encode())
    return total.hexdigest()


def cut(document: Document, length: int) -> list[Document]:
    """A document in pieces of at most ``length`` tokens, each with something to learn.

    A text becomes as many as it takes. Of what follows a prompt there is one, as far as it goes; none where
    the prompt leaves it no room.
    """
    size = len(document.tokens)
    if document.prompt:
        room = min(size, length)
        return [replace(document, tokens=document.tokens[:room])] if document.prompt < room else []
    return [replace(document, tokens=document.tokens[at : at + length]) for at in range(0, size - 1, length)]


def pack(documents: Seq[Document], length: int) -> list[list[Document]]:
    """Rows of at most ``length`` tokens: each piece (``cut``) of a document in the first that has room."""
    rows: list[list[Document]] = []
    room: list[int] = []
    for piece in (piece for document in documents for piece in cut(document, length)):
        size = len(piece.tokens)
        # Rows that are nearly full would make the search long; only the last few are looked at.
        first = max(0, len(rows) - 64)
        place = next((at for at in range(first, len(rows)) if room[at] >= size), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(piece)
        room[place] -= size
    return rows


def lost(documents: Seq[Document], length: int) -> list[int]:
    """Of each document whose answer ``cut`` shortens or drops, how many tokens of it are gone."""
    return [
        len(document.tokens) - max(length, document.prompt)
        for document in documents
        if document.prompt and len(document.tokens) > max(length, document.prompt)
    ]
