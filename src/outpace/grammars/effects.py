"""JSON schemas without what has no effect in them, which a grammar would otherwise refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_EACH = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_ONE = {
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
}
_VALUES = {"const", "default", "enum", "example", "examples"}  # which are no schemas
# Keys that say nothing about what is valid: of JSON Schema, and names that others may refer to
_NOTES = {
    "$anchor",
    "$comment",
    "$defs",
    "$dynamicAnchor",
    "$id",
    "$recursiveAnchor",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "example",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
}
_FORMATS = {  # that llguidance knows; others are notes, as JSON Schema has it
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
}
_DRAFTS = {
    *(f"https://json-schema.org/draft/{year}/schema" for year in ("2020-12", "2019-09")),
    *(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
}
_TYPES = {"null", "boolean", "number", "string", "array", "object"}
_OF = {  # the type that a key is about
    **dict.fromkeys(
        ("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        "object",
    ),
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"), "array"),
    "format": "string",
}
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not", "$dynamicRef"}
_DYNAMIC = {"$dynamicAnchor": "$anchor", "$dynamicRef": "$ref", "$recursiveRef": "$ref"}
_WHOLE = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}


def effective(schema: Any) -> Any:
    """A schema that allows the same values, without keys that have no effect on them.

    These are keys that are null, that are about another type than the schema's, or whose value allows
    everything, formats that are unknown, and what only together with another key has an effect. In place of
    an ``if`` that everything meets, or nothing, its branch stays. A ``not`` of everything makes a schema
    ``False``.
    """
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if value is not None or key in _VALUES}
    for key in _WHOLE & found.keys():
        if isinstance(found[key], float) and found[key].is_integer():
            found[key] = int(found[key])
    found = _each_within(found, effective)
    kinds = _kinds(found)
    found = {key: value for key, value in found.items() if _OF.get(key, "") in ("", *kinds)}
    for drop in (_with_static, _without_notes, _without_free, _without_if, _without_pairs, _with_named):
        found = drop(found)
    return _without_not(found, kinds)


def moved(schema: Any, place: str) -> Any:
    """A schema at another place of a document, given as a reference: what refers to its root refers there."""
    if not isinstance(schema, dict):
        return schema
    found = _each_within(schema, partial(moved, place=place))
    own = found.get("$ref")
    if isinstance(own, str) and (own == "#" or own.startswith("#/")):
        found["$ref"] = place + own[1:]
    return found


def refers(schema: Any, beyond: tuple[str, ...]) -> bool:
    """True if a schema refers to its root, or within it elsewhere than to places that begin so."""
    seen = [schema]
    while seen:
        if isinstance(one := seen.pop(), dict):
            own = one.get("$ref")
            if isinstance(own, str) and own.startswith("#") and not own.startswith(beyond):
                return True
            _each_within(one, seen.append)
    return False


def _each_within(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with each of the schemas that it contains as ``change`` makes it."""
    found = dict[str, Any]()
    for key, value in schema.items():
        if key in _EACH and isinstance(value, dict):
            value = {name: change(one) for name, one in value.items()}
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            value = [change(one) for one in value]
        elif key in _ONE:
            value = change(value)
        found[key] = value
    return found


def lists_keys(schema: Any) -> bool:
    """True if a schema lists the keys of all objects in its values: a grammar has each of them once."""
    if not isinstance(schema, dict):
        return schema is False
    if "enum" in schema or "const" in schema:
        return True
    kinds, combined = _kinds(schema), schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}
    shut = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if "object" in kinds and not combined and not shut:
        return False
    if "array" in kinds and not combined and "items" not in schema:
        return False
    inner = [schema[key] for key in ("items", "additionalItems") if key in schema]
    for key, value in schema.items():
        if key in _EACH and isinstance(value, dict):
            inner += value.values()
        elif key in _LISTS and isinstance(value, list):
            inner += value
    return all(map(lists_keys, inner))


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows by its ``type``; an integer is a number."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return set(_TYPES)
    return {"number" if kind == "integer" else kind for kind in kinds}


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are the same; a truth value is no number."""
    return _kind(one) == _kind(other) and bool(one == other)


def _free(schema: Any) -> bool:
    """True for a schema that allows everything."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _NOTES)


def _without_notes(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without names and notes that are refused although they say nothing about what is valid."""
    dropped = {"$recursiveAnchor"}
    dropped |= set() if str(schema.get("$schema")).rstrip("#") in _DRAFTS else {"$schema"}
    dropped |= {"format"} if schema.get("format") not in _FORMATS else set()
    return {key: value for key, value in schema.items() if key not in dropped}


def _with_static(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose references are static: those of a document of one schema depend on nothing else."""
    found = {key: value for key, value in schema.items() if key not in _DYNAMIC}
    for key, other in _DYNAMIC.items():
        own = schema.get(key)
        if not isinstance(own, str) or other in found or (other == "$ref" and not own.startswith("#")):
            found |= {key: own} if key in schema else {}
        else:
            found[other] = own
    return found


def _without_if(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with the branch of a condition that is always the same in its place."""
    if (met := _met(schema.get("if"), _kinds(schema))) is None:
        return schema
    branch, others = schema.get("then" if met else "else", True), schema.get("allOf", [])
    found = {key: value for key, value in schema.items() if key not in ("if", "then", "else")}
    if _free(branch):
        return found
    return found | {"allOf": [*others, branch]} if isinstance(others, list) else schema


def _met(condition: Any, kinds: set[str]) -> bool | None:
    """Whether values of these types meet a condition; None if it depends on the value."""
    if condition is False or _free(condition):
        return condition is not False
    if not isinstance(condition, dict) or "type" not in condition:
        return None
    if not kinds & _kinds(condition):
        return False
    alone = condition.keys() <= _NOTES | {"type"} and "integer" not in str(condition["type"])
    return True if alone and kinds <= _kinds(condition) else None


def _names_free(names: Any) -> bool:
    """True for a schema of names that allows every text."""
    if not isinstance(names, dict):
        return names is True
    return names.keys() <= _NOTES | {"type"} and "string" in _kinds(names)


_FREE: dict[str, Callable[[Any], bool]] = {
    "propertyNames": _names_free,
    "uniqueItems": lambda value: value is False,
    **dict.fromkeys(("minLength", "minItems", "minProperties"), lambda value: value == 0),
    "dependentRequired": lambda value: isinstance(value, dict) and not any(value.values()),
    "dependentSchemas": lambda value: isinstance(value, dict) and all(map(_free, value.values())),
    "dependencies": lambda value: (
        isinstance(value, dict) and all(one == [] or _free(one) for one in value.values())
    ),
    "unevaluatedProperties": _free,
    "unevaluatedItems": _free,
    "patternProperties": lambda value: value == {},
    "allOf": lambda value: isinstance(value, list) and all(map(_free, value)),
    "not": lambda value: value is False,
}


def _without_free(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without keys that allow everything by themselves."""
    return {key: value for key, value in schema.items() if not (key in _FREE and _FREE[key](value))}


def _without_pairs(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without keys that say nothing without, or together with, another one."""
    found = dict(schema)
    branches = [found.get(key, True) for key in ("then", "else")]
    if "if" not in found or all(map(_free, branches)):
        found = {key: value for key, value in found.items() if key not in ("if", "then", "else")}
    least = found.get("minContains", 1)
    if "contains" not in found or (least == 0 and "maxContains" not in found):
        found = {k: v for k, v in found.items() if k not in ("contains", "minContains", "maxContains")}
    elif _free(found["contains"]) and isinstance(least, int):
        del found["contains"]
        found["minItems"] = max(found.get("minItems", 0), found.pop("minContains", 1))
        if "maxContains" in found:
            found["maxItems"] = min(found.get("maxItems", 2**31), found.pop("maxContains"))
    if found.get("uniqueItems") is True and found.get("maxItems") in (0, 1):
        del found["uniqueItems"]
    if found.get("unevaluatedProperties") is False and not found.keys() & _COMBINING:
        found["additionalProperties"] = found.get("additionalProperties", False)
        del found["unevaluatedProperties"]
    needed = found.get("required")
    dependent = found.get("dependentRequired")
    if isinstance(dependent, dict) and isinstance(needed, list):
        lists = dependent.values()
        if all(isinstance(names, list) and all(name in needed for name in names) for names in lists):
            del found["dependentRequired"]
    return found


def _with_named(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose names, if it lists them or has a pattern of them, are keys of its own."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    value, told = schema.get("additionalProperties", True), names.keys() - _NOTES - {"type"}
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(listed, list) and told <= {"enum", "const"}:
        keys = {name: value for name in listed if isinstance(name, str)}
        return rest | {"properties": keys, "additionalProperties": False}
    if told == {"pattern"}:
        return rest | {"patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    return schema


def _without_not(schema: dict[str, Any], kinds: set[str]) -> Any:
    """A schema without a ``not`` of everything, of types alone, or of values that it can do without."""
    forbidden = schema.get("not")
    if "not" not in schema or forbidden is None:
        return schema
    if _free(forbidden):
        return False
    if not isinstance(forbidden, dict):
        return schema
    rest, told = {key: value for key, value in schema.items() if key != "not"}, forbidden.keys() - _NOTES
    values = forbidden.get("enum", [forbidden["const"]] if "const" in forbidden else None)
    if isinstance(values, list) and len(told) == 1:
        if isinstance(listed := rest.get("enum"), list):
            few = [one for one in listed if not any(_equal(one, value) for value in values)]
            return rest | {"enum": few} if few else False
        return schema if kinds & set(map(_kind, values)) else rest
    if "type" not in forbidden:
        return schema
    out = _kinds(forbidden)
    if not kinds & out:  # whatever else it says
        return rest
    if told != {"type"} or "integer" in str(forbidden["type"]):
        return schema
    left = kinds - out
    given = schema.get("type")
    if isinstance(given, list):
        return rest | {
            "type": [kind for kind in given if kind in left or (kind == "integer" and "number" in left)]
        }
    return rest | {"type": sorted(left)} if left else False
