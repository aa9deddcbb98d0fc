"""Schemas and grammars of answers: which are compiled quickly, and which cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.core import OutpaceError
from outpace.grammars.compiling import bytes_alone, compiled

_NODES = 256  # of a plain schema
_NOTES = {"type", "required", "title", "description", "default", "enum", "const"}


@dataclass(frozen=True)
class Lark:
    """A grammar in llguidance's form of Lark, whose terminals are texts, tokens and JSON schemas.

    Attributes:
        text: the grammar.
        bytes: the same for a tokenizer of single bytes, which has no special tokens.
        schemas: the schemas in it, of the functions with these names.
        unlisted: its texts are JSON, but for marks, and may have keys that no schema lists.
    """

    text: str
    bytes: str
    schemas: Mapping[str, dict[str, Any]]
    unlisted: bool = False


def is_plain(schema: Any) -> bool:
    """True for a schema that is compiled in a few milliseconds: short, of types and enumerations alone.

    Patterns, combinations of schemas, lengths, formats and references are not plain.
    """
    left, nodes = [schema], 0
    while left:
        one = left.pop()
        nodes += 1
        if isinstance(one, bool):
            continue
        if nodes > _NODES or not isinstance(one, dict):
            return False
        for key, value in one.items():
            if key == "properties" and isinstance(value, dict):
                left.extend(value.values())
            elif key in ("items", "additionalProperties"):
                left.append(value)
            elif key == "anyOf" and isinstance(value, list):
                left.extend(value)
            elif key in ("minimum", "maximum") and isinstance(value, int | float) and abs(value) < 1e9:
                continue
            elif key not in _NOTES:
                return False
    return True


def unforced(schemas: Mapping[str, dict[str, Any]]) -> str | None:
    """Why a call cannot be forced: the name of the function whose schema is the reason; None for another.

    Args:
        schemas: those of arguments, by the names of functions.
    """
    for name, schema in schemas.items():
        try:
            compiled(bytes_alone(), {"type": "object"} | schema)
        except OutpaceError as error:
            return f"a call of {name!r} cannot be forced: {error}; leave it out, or let tool_choice be auto"
    return None
