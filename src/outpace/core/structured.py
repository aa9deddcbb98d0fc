"""A constraint of a request's text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outpace.core.errors import OutpaceError


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint of the text, of exactly one kind; a mapping in its place has these keys.

    Attributes:
        json: a JSON schema, or its text.
        regex: a regular expression that the whole text matches, without look-around and backreferences.
        choice: texts, one of which the output is.
        grammar: a grammar in llama.cpp's GBNF, or in llguidance's Lark.
    """

    json: Mapping[str, object] | str | None = None
    regex: str | None = None
    choice: Seq[str] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name)]
        if self.json == {}:
            given.append("json")
        if len(given) != 1:
            told = " and ".join(given) or "none of them"
            raise OutpaceError(f"structured_outputs needs one of json, regex, choice and grammar, not {told}")
        choice = tuple(self.choice) if not isinstance(self.choice, str) else (self.choice,)
        if not all(isinstance(text, str) and text for text in choice):
            raise OutpaceError("choice must be a list of texts that are not empty")
        if not all(isinstance(getattr(self, name), str | None) for name in ("regex", "grammar")):
            raise OutpaceError(f"{given[0]} must be a text")
        object.__setattr__(self, "choice", choice)
        object.__setattr__(self, "json", _schema_text(self.json))


def _schema_text(schema: object) -> str | None:
    """A schema as its text, by which a constraint can be told from others."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if found is None:
            return None
        if not isinstance(found, Mapping):
            raise TypeError("not an object")
        return json.dumps(dict(found), sort_keys=False)
    except (TypeError, ValueError) as error:
        raise OutpaceError(f"the schema of structured_outputs is no JSON object: {error}") from error
