"""Compiling of JSON schemas by llguidance, within its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llguidance

from outpace.core import OutpaceError
from outpace.serve.effects import effective

# Fuel and items of a mask are about 10 ms; a state takes 1 to 2 kB.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
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


def bytes_alone() -> llguidance.LLTokenizer:
    """A tokenizer of single bytes."""
    return llguidance.LLTokenizer("byte")


def compiled(
    tokenizer: llguidance.LLTokenizer, schema: dict[str, Any] | str, prefix: str | None = None
) -> llguidance.LLMatcher:
    """A matcher of the JSON texts that a schema allows, without optional whitespace; or of a grammar's texts.

    Args:
        prefix: a grammar of what comes before, in which the text is ``@body``; None for nothing.

    Raises:
        OutpaceError: the schema is wrong, or beyond llguidance's limits.
    """
    try:
        if isinstance(schema, str):
            body: dict[str, Any] = {"lark_grammar": llguidance.LLMatcher.grammar_from_lark(schema)}
        else:
            own = effective(schema)
            spacing = {"x-guidance": {"whitespace_flexible": False}}
            body = {"json_schema": own | spacing if isinstance(own, dict) else own}
        first = [] if prefix is None else [{"lark_grammar": prefix}]
        text = json.dumps({"grammars": [*first, body | {"name": "body"}]})
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        matcher.compute_bitmask()
    except ValueError as error:
        raise OutpaceError(f"the schema cannot be used: {error}") from error
    if matcher.is_error():
        raise OutpaceError(f"the schema cannot be used: {matcher.get_error().strip()}")
    return matcher


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
