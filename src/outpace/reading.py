"""Texts and conversations as token ids, by a tokenizer and its chat template. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeGuard

from outpace.core import ContextOverflow, OutpaceError, first_line
from outpace.files import check_text

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


def is_conversation(prompt: Any) -> TypeGuard[Messages]:
    """True for a list of messages, as opposed to one of token ids or of prompts."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def has_template(tokenizer: Any) -> bool:
    """True if there is a chat template."""
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
            does not end.
    """
    if not has_template(tokenizer):
        raise OutpaceError(f"{name} has no chat template; give the prompt as a text, not as messages")
    if not all(isinstance(message, Mapping) and message.get("role") for message in messages):
        raise OutpaceError('a message is a dict with its role, as in {"role": "user", "content": "Hi"}')
    try:
        with _bounded():
            text: str = tokenizer.apply_chat_template(
                list(messages), tokenize=False, **{"add_generation_prompt": True, **options}
            )
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        raise OutpaceError(f"the chat template of {name} failed: {first_line(error)}") from error
    return text


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
