"""The text of spec strings: its parts outside parentheses, lists of specs, and specs written as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from outpace.core import OutpaceError

_IN_JSON = '{"method": "lookahead", "window": 7}'
_OPTION = re.compile(r"\s*\w+\s*=")


def split(text: str, separator: str) -> list[str]:
    """The parts of a text, stripped, between separators outside parentheses."""
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == separator and not depth:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]


def balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return depth == 0


def split_specs(text: str) -> list[str]:
    """Split a list of specs at its commas.

    A comma within parentheses or JSON, or before ``name=``, belongs to a spec.
    """
    specs: list[str] = []
    depth = 0
    for piece in text.split(","):
        if specs and (depth > 0 or _OPTION.match(piece)):
            specs[-1] += "," + piece
        else:
            specs.append(piece)
        depth += sum(piece.count(mark) for mark in "({[") - sum(piece.count(mark) for mark in ")}]")
    return [plain(spec.strip()) for spec in specs]


class _Written(str):
    """A spec that was an object in JSON."""


def plain(spec: str) -> str:
    """A spec without JSON.

    Raises:
        OutpaceError: it begins as JSON does, and does not describe a method.
    """
    if not spec.lstrip().startswith("{"):
        return spec
    try:
        return str(json.loads(spec, object_pairs_hook=_written))
    except (ValueError, RecursionError) as error:
        if isinstance(error, OutpaceError):
            raise
        raise OutpaceError(
            f"{spec.strip()!r} is no JSON ({error}); a spec in JSON is as in {_IN_JSON}"
        ) from None


def _written(pairs: list[tuple[str, Any]]) -> _Written:
    """An object of JSON as a spec."""
    names = [value for key, value in pairs if key == "method"]
    if len(names) != 1 or not isinstance(names[0], str):
        raise OutpaceError(f"a spec in JSON names one method, as in {_IN_JSON}")
    options = ",".join(f"{key}={_text(key, value)}" for key, value in pairs if key != "method")
    return _Written(f"{names[0]}:{options}" if options else names[0])


def _text(option: str, value: Any) -> str:
    """A value of JSON as in a spec; in a list, a text is a spec."""
    if isinstance(value, list):
        return "+".join(_text(option, _Written(one) if isinstance(one, str) else one) for one in value)
    if isinstance(value, _Written):
        return f"({value})"
    if not isinstance(value, str):
        return "none" if value is None else json.dumps(value)
    if not balanced(value) or split(value, ",") != [value]:
        raise OutpaceError(
            f"{option}: {value!r} cannot be given in a spec, since it has a comma, a parenthesis "
            "of no pair or a space at an end"
        )
    return value
