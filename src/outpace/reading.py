"""Texts and conversations as token ids, by a tokenizer and its chat template. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.core import OutpaceError, first_line
from outpace.files import check_text


def token_ids(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Token ids of a text of any length.

    Args:
        special: add the tokenizer's special tokens at its ends.

    Raises:
        OutpaceError: the text contains an unpaired surrogate.
    """
    check_text(text)
    return list(tokenizer(text, add_special_tokens=special).input_ids)


def render(tokenizer: Any, name: str, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """A conversation in a tokenizer's chat template, up to where the answer begins.

    Args:
        name: the model's name, for errors.
        messages, options: as for ``Loaded.render``.

    Raises:
        OutpaceError: the template rejects the messages.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, **{"add_generation_prompt": True, **options}
        )
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        raise OutpaceError(f"the chat template of {name} failed: {first_line(error)}") from error
    return text
