"""Values of arguments that a model writes as texts: their types are those of the function's schema."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from pydantic_core import from_json

from outpace.serve.json_calls import DEEP, Schema, from_python

_SCHEMAS = 256  # that are looked at for one value
_TOLD = {"properties": "object", "items": "array", "pattern": "string", "format": "string"}
_REFERENCES = "$ref", "$dynamicRef", "$recursiveRef"
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def properties(schema: Schema) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def resolved(schema: Any, root: Schema) -> Any:
    """A schema in place of a reference to one of the root's definitions."""
    for _ in range(DEEP):
        found = [schema.get(key) for key in _REFERENCES] if isinstance(schema, dict) else []
        reference = next((one for one in found if isinstance(one, str)), None)
        if reference is None:
            return schema
        schema = _referred(unquote(reference).removeprefix("#"), root)
    return None


def _referred(place: str, root: Schema) -> Any:
    """What a JSON pointer names in the root; None for nothing."""
    found: Any = None if place and not place.startswith("/") else root
    for name in place.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")  # as JSON pointers escape them
        if isinstance(found, list) and name.isdecimal():
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    if "enum" in schema:
        return isinstance(schema["enum"], list) and all(isinstance(one, str) for one in schema["enum"])
    return schema.get("type") in ("string", ["string"]) or isinstance(schema.get("const"), str)


def texts_of(schema: Schema) -> list[str]:
    """The texts that a schema allows; empty for any."""
    return list(schema["enum"]) if "enum" in schema else [schema["const"]] if "const" in schema else []


def typed(text: str, schema: Any, root: Schema) -> Any:
    """The value of a text by its schema.

    As in the servers of these models' vendors, a text that reads as null, a truth value, a number, an object
    or a list is one where the schema allows it, and a text where it allows a text and no such thing.
    """
    kinds, word = kinds_of(schema, root), text.strip()
    if kinds == {"string"}:
        return text
    own = resolved(schema, root)
    listed = own.get("enum") if isinstance(own, dict) else None
    for value in _readings(word):
        kind = _kind(value)
        if isinstance(listed, list) and not any(_kind(one) == kind and one == value for one in listed):
            continue
        if not kinds or (kind in kinds and kind != "string") or (kind == "integer" and "number" in kinds):
            return value
        if kind == "number" and "integer" in kinds and value.is_integer():
            return int(value)
    if "string" in kinds:
        return text
    with contextlib.suppress(ValueError):
        return from_json(word, allow_inf_nan=False)
    return text


def kinds_of(schema: Any, root: Schema) -> set[str]:
    """The types of JSON that a schema allows; empty for any."""
    return _kinds(schema, root, iter(range(_SCHEMAS)))


def _kinds(schema: Any, root: Schema, left: Iterator[int]) -> set[str]:
    one = resolved(schema, root)
    if not isinstance(one, dict) or next(left, None) is None:
        return set()
    if isinstance(one.get("enum"), list):
        return {_kind(value) for value in one["enum"]}
    if "const" in one:
        return {_kind(one["const"])}
    found = list[set[str]]()
    if "type" in one:
        kinds = one["type"] if isinstance(one["type"], list) else [one["type"]]
        null = {"null"} if one.get("nullable") is True else set[str]()
        found.append({kind for kind in kinds if isinstance(kind, str)} | null)
    for key in ("anyOf", "oneOf"):
        if isinstance(one.get(key), list):
            each = [_kinds(inner, root, left) for inner in one[key]]
            found.append(set().union(*each) if all(each) else set())
    if isinstance(one.get("allOf"), list):
        found += [_kinds(inner, root, left) for inner in one["allOf"]]
    if not found:
        found = [{kind} for key, kind in _TOLD.items() if key in one][:1]
    known = [kinds for kinds in found if kinds]
    return set.intersection(*known) if known else set()


def _readings(word: str) -> Iterator[Any]:
    """What a word may be as JSON or, as models write them too, as words and literals of Python."""
    with contextlib.suppress(ValueError):
        yield from_json(word, allow_inf_nan=False)
        return
    if word.lower() in _WORDS:
        yield _WORDS[word.lower()]
    elif word[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            yield from_python(word)


def _kind(value: Any) -> str:
    """The type of a value, as JSON Schema calls it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
