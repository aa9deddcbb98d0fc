"""Training texts: documents from JSONL files, a held-out split, and packing of documents into rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from outpace.core import OutpaceError
from outpace.files import check_plain, read_line
from outpace.targets.base import TargetModel

LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Document:
    """A text as token ids.

    Attributes:
        prompt: the number of tokens at the start that are not learnt.
        open: the prompt has no answer yet; the target is to write one.
        source: the tokens from which an encoder-decoder model decodes it.
    """

    tokens: tuple[int, ...]
    prompt: int = 0
    open: bool = False
    source: tuple[int, ...] = ()

    @property
    def digest(self) -> bytes:
        """SHA-256 of source and prompt, or of a text without, so that answers to a prompt stay together."""
        content = self.source + self.tokens[: self.prompt] or self.tokens
        return hashlib.sha256(json.dumps(list(content)).encode()).digest()

    @property
    def asked(self) -> tuple[int, ...]:
        """The tokens to be continued: the prompt, or the first half of a text without one."""
        return self.tokens[: self.prompt or len(self.tokens) // 2]


class Encoder(Protocol):
    """A model's tokenizer, as far as training uses it."""

    def tokens(self, text: str) -> list[int]: ...

    def plain_tokens(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Seq[dict[str, str]]) -> list[int]: ...


def read(source: str | Path, encoder: Encoder, chat: bool = False) -> list[Document]:
    """Read the documents of a JSONL file, or of all such files in a folder, in the order of their names.

    A line is a string, or an object with one of: ``text``; ``prompt`` or ``question`` and, optionally,
    ``response`` or ``answer``; ``messages``, a chat whose last turn is learnt if it is the assistant's;
    ``tokens``, ``prompt_length`` and, optionally, ``source``, as written by ``write``.

    Args:
        chat: treat prompts as turns of a chat.

    Raises:
        OutpaceError: there is no such file, no document in it, or a line cannot be read; the message names
            it.
    """
    path = Path(source)
    files = sorted(file for file in path.rglob("*") if file.suffix in LINES) if path.is_dir() else [path]
    found = [one for file in files for one in _read(file, encoder, chat)]
    if not found:
        raise OutpaceError(f"there is no document in {source}; give a JSONL file, or a folder of them")
    return found


def _read(file: Path, encoder: Encoder, chat: bool) -> Iterator[Document]:
    check_plain(file)
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
    """Make a document of a line of JSONL, in the format described at ``read``.

    Raises:
        OutpaceError: the line contains none; the message does not name the line.
    """
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise OutpaceError("neither a string nor an object")
    if "tokens" in value:
        tokens, source = _ids(value, "tokens"), _ids(value, "source")
        prompt = value.get("prompt_length", 0)
        if type(prompt) is not int or not 0 <= prompt <= len(tokens):
            raise OutpaceError(f'"prompt_length" is not a number from 0 to {len(tokens)}')
        return replace(_checked(tokens, prompt), source=tuple(source))
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
        raise OutpaceError('"messages" contains no turn before the answer')
    return _answered(encoder.encode_chat(before), messages[-1]["content"] if answered else None, encoder)


def _answered(prompt: list[int], answer: str | None, encoder: Encoder) -> Document:
    if answer is None:
        return _checked(prompt, len(prompt), open=True)
    return _checked([*prompt, *encoder.plain_tokens(answer)], len(prompt))


def _ids(value: dict[str, Any], name: str) -> list[int]:
    ids = value.get(name, [])
    if not (isinstance(ids, list) and all(type(token) is int for token in ids)):
        raise OutpaceError(f'"{name}" is not a list of token ids')
    return ids


def _string(value: dict[str, Any], name: str) -> str:
    if not isinstance(value[name], str):
        raise OutpaceError(f'"{name}" is not a string')
    return str(value[name])


def _checked(tokens: Seq[int], prompt: int, open: bool = False) -> Document:
    if not tokens:
        raise OutpaceError("the text is empty")
    return Document(tuple(tokens), prompt, open)


def write(documents: Seq[Document], file: Path, append: bool = False) -> None:
    """Write documents as token ids, in a format that ``read`` reads."""
    with file.open("a" if append else "w", encoding="utf-8") as opened:
        for document in documents:
            line: dict[str, Any] = {"tokens": document.tokens, "prompt_length": document.prompt}
            if document.source:
                line["source"] = document.source
            opened.write(json.dumps(line) + "\n")


def sourced(document: Document, target: TargetModel) -> Document:
    """The document as an encoder-decoder model decodes it: the prompt is the source, the answer its text.

    For other models, and if it has a source already, the document is unchanged.

    Raises:
        OutpaceError: it has no prompt to be the source.
    """
    if not target.has_encoder or document.source:
        return document
    if not document.prompt:
        raise OutpaceError(
            f"{target.name} is an encoder-decoder model, which answers prompts; give prompts, not texts"
        )
    start, source = target.parts(document.tokens[: document.prompt])
    tokens = (*start, *document.tokens[document.prompt :])
    return replace(document, tokens=tokens, prompt=len(start), source=tuple(source or ()))


@dataclass(frozen=True)
class Split:
    """Documents by purpose.

    Attributes:
        learnt: for training.
        calibration: for measuring the accuracy of a drafter's heads; may be empty.
        held_out: for the reported metric.
    """

    learnt: list[Document]
    calibration: list[Document]
    held_out: list[Document]


def check_vocabulary(documents: Seq[Document], vocabulary: int) -> None:
    """Check that all tokens are in a vocabulary.

    Raises:
        OutpaceError: some are not.
    """
    tokens = {token for document in documents for token in document.tokens}
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise OutpaceError(
            f"the texts have token ids from {min(tokens)} to {max(tokens)}, and the target has {vocabulary}; "
            "give texts tokenized for the target"
        )


def split(documents: Seq[Document], share: float) -> Split:
    """Split documents: about ``share`` held out, half as many for calibration, the others for training.

    A document's part depends on its own hash alone, so it stays the same whatever other data there is.

    Raises:
        OutpaceError: there are none to learn from, or none held out.
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
            f"with {len(documents)} documents and a held-out share of {share} one part is empty; give more "
            "documents, or another share"
        )
    return found


def digest(documents: Seq[Document]) -> str:
    """SHA-256 of all documents in order, as hexadecimal digits."""
    total = hashlib.sha256()
    for document in documents:
        total.update(json.dumps([document.prompt, *document.tokens, *document.source]).encode())
    return total.hexdigest()


def cut(document: Document, length: int) -> list[Document]:
    """Cut a document into pieces of at most ``length`` tokens, each with something to learn.

    A text without a prompt becomes as many pieces as needed. A document with a prompt is truncated to one
    piece; to none if the prompt leaves no room for an answer.
    """
    size = len(document.tokens)
    if document.prompt:
        room = min(size, length)
        return [replace(document, tokens=document.tokens[:room])] if document.prompt < room else []
    return [replace(document, tokens=document.tokens[at : at + length]) for at in range(0, size - 1, length)]


def pack(documents: Seq[Document], length: int) -> list[list[Document]]:
    """Pack documents, cut into pieces, into rows of at most ``length`` tokens, first fit.

    A document with a source has a row of its own, since a row is decoded from one source.
    """
    rows: list[list[Document]] = []
    room: list[int] = []
    for piece in (piece for document in documents for piece in cut(document, length)):
        size = length if piece.source else len(piece.tokens)
        # Only the last 64 rows are searched: the earlier ones are nearly full.
        first = max(0, len(rows) - 64)
        place = next((at for at in range(first, len(rows)) if room[at] >= size), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(piece)
        room[place] -= size
    return rows


def lost(documents: Seq[Document], length: int) -> list[int]:
    """The number of tokens lost from each document whose answer ``cut`` truncates or drops."""
    return [
        len(document.tokens) - max(length, document.prompt)
        for document in documents
        if document.prompt and len(document.tokens) > max(length, document.prompt)
    ]
