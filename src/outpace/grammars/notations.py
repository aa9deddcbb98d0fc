"""Constraints of texts in the notations that users write, as llguidance's Lark."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from outpace.core import OutpaceError
from outpace.grammars.gbnf import lark_of

Notation = Literal["regex", "choice", "gbnf", "lark"]


@dataclass(frozen=True)
class Free:
    """A constraint as its user wrote it; one of several texts is a list in JSON."""

    notation: Notation
    text: str

    def lark(self) -> str:
        """The same in Lark.

        Raises:
            OutpaceError: it is wrong, or Lark cannot express it.
        """
        if self.notation == "gbnf":
            return lark_of(self.text)
        if self.notation == "choice":
            texts: list[Any] = json.loads(self.text)
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return _of_regex(self.text) if self.notation == "regex" else self.text


def written(kind: str, given: Any) -> dict[str, Any] | Free:
    """A constraint of one of the kinds json, regex, choice and grammar; a JSON schema is as it is given."""
    if kind == "json":
        schema: dict[str, Any] = given
        return schema
    if kind == "grammar":
        return grammar_of(given)
    return Free("choice", json.dumps(given)) if kind == "choice" else Free("regex", given)


def grammar_of(text: str) -> Free:
    """A grammar in GBNF, which alone has "::=", or in Lark."""
    return Free("gbnf" if "::=" in text else "lark", text)


def _of_regex(pattern: str) -> str:
    """A regular expression as the only terminal; / and line breaks would end it."""
    found, escaped = list[str](), False
    for one in pattern:
        if one == "\n":
            found.append("n" if escaped else "\\n")
        else:
            found.append(f"\\{one}" if one == "/" and not escaped else one)
        escaped = one == "\\" and not escaped
    if escaped:
        raise OutpaceError("the regular expression ends in a single backslash")
    return f"start: /{''.join(found)}/"
