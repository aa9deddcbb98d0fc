"""Compiling of JSON schemas and grammars by llguidance, within its limits."""

from __future__ import annotations

import json
from typing import Any

import llguidance

from outpace.core import OutpaceError
from outpace.grammars.effects import effective

# Fuel and items of a mask are about 10 ms; a state takes 1 to 2 kB.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}


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
