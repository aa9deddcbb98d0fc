"""Texts and conversations as token ids, by a tokenizer and its chat template. Imports no torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeGuard

from outpace.core import ContextOverflow, OutpaceError, first_line
from outpace.files import check_text

_HERE = "qzcontinued"  # a word that no template has of its own
_RARE = "\u263a"  # a character that no token joins with the next
_MARK = re.compile(r"\u2581?(?:<\S{1,64}>|\[[A-Z_/]{2,64}\])")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# A conversation in the format of chat templates: messages with "role" and "content".
Messages = Sequence[Mapping[str, Any]]

_TEMPLATE = "<template>"  # the file name of what Jinja compiles from a text
_LINES = 1 << 21  # of a compiled template: a conversation takes a few dozen per message
_LETTERS = 6  # per token that there is room for: few texts have more


def token_ids(tokenizer: Any, text: str, special: bool = True, most: int | None = None) -> list[int]:
    """Token ids of a text of any length.

    Args:
        special: add the tokenizer's special tokens at its ends.
        most: the number of tokens that there is room for; a text with far more is not tokenised to its end.

    Raises:
        OutpaceError: the text contains an unpaired surrogate.
        ContextOverflow: its beginning alone has more than ``most`` tokens, by a margin.
    """
    check_text(text)
    letters = _LETTERS * max(most or 0, 64)
    while most is not None and letters < len(text):
        # A text has at least the tokens of its beginning, but for the few where it is cut.
        if len(tokenizer(text[:letters], add_special_tokens=False).input_ids) > most + most // 8 + 64:
            raise ContextOverflow(
                f"the prompt has {len(text)} characters, of which the first {letters} alone have more than "
                f"the {most} tokens of the model's context; shorten the prompt"
            )
        letters *= 4
    return list(tokenizer(text, add_special_tokens=special).input_ids)


def unmarked_ids(tokenizer: Any, text: str, marks: Mapping[str, int], begins: bool = True) -> list[int]:
    """Token ids of a text in which nothing becomes a mark, even if it is spelt like one.

    The text is tokenised in pieces, which end within each such spelling.

    Args:
        marks: as ``marks_of``.
        begins: the text is the beginning of one, before which some tokenizers put a space.

    Raises:
        OutpaceError: the text contains an unpaired surrogate, or becomes a mark all the same.
    """
    check_text(text)
    spellings = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    pattern = re.compile(spellings or r"(?!)")
    pieces, place = list[str](), 0
    while (found := pattern.search(text, place)) is not None:
        pieces.append(text[place : found.start() + 1])
        place = found.start() + 1
    pieces.append(text[place:])
    first = [pieces.pop(0)] if begins else []
    ids = [token for one in _pieces(tokenizer, first) + _within(tokenizer, pieces) for token in one]
    if made := set(ids) & set(marks.values()):
        spelt = tokenizer.convert_ids_to_tokens([min(made)])[0]
        raise OutpaceError(f"this tokenizer makes its mark {spelt} of the text; send the text without it")
    return ids


def _pieces(tokenizer: Any, pieces: list[str]) -> list[list[int]]:
    if not any(pieces):
        return []
    ids: list[list[int]] = tokenizer(pieces, add_special_tokens=False).input_ids
    return ids


def _within(tokenizer: Any, pieces: list[str]) -> list[list[int]]:
    """Token ids of pieces within a text, before which no tokenizer shall put a space."""
    alone = list(tokenizer(_RARE, add_special_tokens=False).input_ids)
    if not pieces or not str(tokenizer.convert_ids_to_tokens(alone[:1])[0]).startswith("\u2581"):
        return _pieces(tokenizer, pieces)
    found = _pieces(tokenizer, [_RARE + piece for piece in pieces])
    if not all(one[: len(alone)] == alone for one in found):
        return _pieces(tokenizer, pieces)
    return [one[len(alone) :] for one in found]


def marks_of(tokenizer: Any) -> dict[str, int]:
    """The tokens that no text is written with, by their spellings: special ones, and what looks like them."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None:  # a GGUF file's
        named, control = tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
        return {
            text: token
            for text, token in named.items()
            if len(text) > 1 and (text in control or _MARK.fullmatch(text)) and not _BYTE.fullmatch(text)
        }
    return {
        one.content: token
        for token, one in added.items()
        if len(one.content) > 1 and (one.special or _MARK.fullmatch(one.content))
    }


def is_conversation(prompt: Any) -> TypeGuard[Messages]:
    """True for a list of messages, as opposed to one of token ids or of prompts."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def chat_ids(tokenizer: Any, name: str, messages: Messages, **options: Any) -> list[int]:
    """Token ids of a conversation of any length; the arguments and errors are those of ``render``."""
    return token_ids(tokenizer, render(tokenizer, name, messages, **options), special=False)


def render(tokenizer: Any, name: str, messages: Messages, **options: Any) -> str:
    """A conversation in a tokenizer's chat template, up to where the answer begins.

    Args:
        name: the model's name, for errors.
        messages: dicts with "role" and "content".
        options: passed to the template, such as ``tools`` or ``add_generation_prompt=False``.

    Raises:
        OutpaceError: there is no chat template, a message has no role, or the template rejects them or
            does not end, or does not show one to be continued.
    """
    if not has_template(tokenizer):
        raise OutpaceError(f"{name} has no chat template; give the prompt as a text, not as messages")
    if not all(isinstance(message, Mapping) and message.get("role") for message in messages):
        raise OutpaceError('a message is a dict with its role, as in {"role": "user", "content": "Hi"}')
    continued = options.pop("continue_final_message", False)
    turns = [*messages[:-1], _begun(messages[-1])] if continued else list(messages)
    try:
        with _bounded():
            text: str = tokenizer.apply_chat_template(
                turns, tokenize=False, **{"add_generation_prompt": not continued, **options}
            )
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        raise OutpaceError(f"the chat template of {name} failed: {first_line(error)}") from error
    if not continued:
        return text
    text, shown, _ = text.rpartition(_HERE)
    if not shown:
        raise OutpaceError(
            f"the chat template of {name} does not show the last message, which is therefore not continued"
        )
    return text


def _begun(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose text ends in a word, at which a rendered conversation is cut.

    The template closes the message behind it, and what it trims of a text's end stays.
    """
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _HERE}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _HERE}]}


@contextmanager
def _bounded() -> Iterator[None]:
    """A limit on the lines that a template runs through, since loops in loops may not end in a lifetime.

    Python counts them. A debugger is not told of what runs in the meantime.
    """
    left = _LINES

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise OutpaceError(f"it runs through more than {_LINES} lines; correct its loops")
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename == _TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
