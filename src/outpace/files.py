"""The values of JSON lines that a user wrote. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

from outpace.core import OutpaceError


def read_line(line: str) -> Any:
    """The value of a line.

    Raises:
        OutpaceError: it is no JSON, or has half a character; the message does not say where.
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


def check_text(text: str) -> None:
    """Refuse half a character, which no tokenizer takes: a lone surrogate, or a byte that is not UTF-8.

    Raises:
        OutpaceError: the message names it.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise OutpaceError(
            f"{half!a} is half a character; write the other half too, or leave it out"
        ) from None
