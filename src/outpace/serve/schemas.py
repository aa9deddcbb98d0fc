"""Compiling of JSON schemas by llguidance, within its limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from outpace.core import OutpaceError

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
        schemas: the schemas in it.
    """

    text: str
    bytes: str
    schemas: Sequence[dict[str, Any]]


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


def compiled(tokenizer: llguidance.LLTokenizer, schema: dict[str, Any] | str) -> llguidance.LLMatcher:
    """A matcher of the JSON texts that a schema allows, without optional whitespace; or of a grammar's texts.

    Raises:
        OutpaceError: the schema is wrong, or beyond llguidance's limits.
    """
    try:
        if isinstance(schema, str):
            text = llguidance.LLMatcher.grammar_from_lark(schema)
        else:
            text = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_flexible": False}
            )
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        matcher.compute_bitmask()
    except ValueError as error:
        raise OutpaceError(f"the schema cannot be used: {error}") from error
    if matcher.is_error():
        raise OutpaceError(f"the schema cannot be used: {matcher.get_error().strip()}")
    return matcher
