"""Schemas of forced calls: what has no effect is left out, and a client's texts stay as they are."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from calling import CHAT, MESSAGES, PATHS, RESPONSES, WRITTEN, answered, body
from outpace.core import OutpaceError
from outpace.grammars.compiling import bytes_alone, compiled
from outpace.grammars.effects import effective, lists_keys
from outpace.serve.calls import CallFormat, literal
from outpace.serve.errors import Refused
from outpace.serve.json_calls import Signature
from outpace.serve.marked import Coder, Dsml, Glm
from outpace.serve.pairs import Pairs
from serving import run, serving


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT = {"type": "string"}
FREE = {"type": "object", "properties": {"a": TEXT}}
# Schemas, a value that each allows and one that it does not; None for no such value.
SAME: list[tuple[Any, str, str | None]] = [
    ({"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT}, '{"a":"b"}', '{"a":1}'),
    ({"type": "object", "propertyNames": {}, "additionalProperties": {}}, '{"a":1}', None),
    ({"type": "object", "propertyNames": {"minLength": 0}, "minProperties": 0}, '{"":1}', None),
    ({"type": "array", "uniqueItems": False, "items": TEXT}, '["a","a"]', "[1]"),
    ({**obj(a=TEXT), "dependentRequired": {}}, '{"a":"b"}', '{"a":1}'),
    ({**obj(a=TEXT), "dependentRequired": {"b": ["a"]}}, '{"a":"b"}', None),
    ({**obj(a=TEXT), "dependentSchemas": {"a": {}}, "if": {}, "patternProperties": {}}, '{"a":"b"}', None),
    ({"type": "string", "format": "color"}, '"x"', "1"),
    ({"type": "string", "format": "regex", "contentEncoding": "base64"}, '"x"', None),
    ({"type": "string", "format": "uuid"}, '"123e4567-e89b-12d3-a456-426614174000"', '"x'),
    ({"type": "object", "properties": {"a": TEXT, "b": {"not": {}}}}, '{"a":"b"}', '{"b'),
    ({"type": ["string", "null"], "not": {"type": "null"}}, '"x"', "null"),
    ({"type": "string", "not": {"type": "null"}}, '"x"', "null"),
    ({"type": "string", "not": {"const": None}}, '"x"', "null"),
    ({"type": ["string", "null"], "not": {"enum": [1, []]}}, "null", "1"),
    ({"enum": ["a", "b", 1, True], "not": {"enum": ["b", 1.0]}}, "true", '"b"'),
    ({"enum": ["a", 1, True], "not": {"const": 1}, "description": "x"}, "true", "1"),
    ({"type": "string", "uniqueItems": True, "contains": {"const": 1}}, '"x"', "1"),
    ({"type": "array", "contains": {}, "items": TEXT}, '["a"]', "[]"),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, "[1]", "[1,"),
    ({"type": "string", "minLength": 2.0, "pattern": None, "default": None}, '"ab"', '"a"'),
    ({"$schema": "https://example.org/own", "type": "string", "$dynamicAnchor": "a"}, '"x"', "1"),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": TEXT},
        '{"a":"x"}',
        '{"c',
    ),
    ({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {}}, '{"ab":1}', '{"c'),
    ({**obj(a=TEXT), "unevaluatedProperties": False}, '{"a":"b"}', '{"a":"b","c'),
    ({**FREE, "if": {}, "then": {"required": ["a"]}}, '{"a":"b"}', "{}"),
    ({**FREE, "if": True, "then": {"required": ["a"]}, "else": False}, '{"a":"b"}', "{}"),
    ({**FREE, "if": {"type": "object"}, "then": {"required": ["a"]}, "allOf": [{}]}, '{"a":"b"}', "{}"),
    ({**FREE, "if": {"type": "array"}, "then": {"required": ["a"]}}, "{}", '{"a":1}'),
    ({**FREE, "if": {"not": {}}, "then": False, "else": {"required": ["a"]}}, '{"a":"b"}', "{}"),
    ({**FREE, "if": False, "then": {"required": ["a"]}}, "{}", '{"a":1}'),
    ({**FREE, "$recursiveAnchor": True, "additionalProperties": {"$recursiveRef": "#"}}, '{"b":{}}', None),
    ({**FREE, "$dynamicAnchor": "n", "additionalProperties": {"$dynamicRef": "#n"}}, '{"b":{}}', '{"b":1}'),
    ({"enum": [None, {"not": {}, "format": "x"}]}, '{"not":{},"format":"x"}', "{}"),
]


def allows(grammar: Any, text: str) -> bool:
    matcher = compiled(bytes_alone(), grammar)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(("schema", "good", "bad"), SAME)
def test_what_has_no_effect_is_left_out(schema: Any, good: str, bad: str | None) -> None:
    assert allows(schema, good) and effective(effective(schema)) == effective(schema)
    if bad is not None:
        data = list(bad.encode())
        matcher = compiled(bytes_alone(), schema)
        assert matcher.try_consume_tokens(data) < len(data) or not matcher.is_accepting()
    for inner in ({"items": schema}, obj(a=schema), {"anyOf": [schema]}, {"$ref": "#/$defs/x"}):
        whole = {"type": "object", "properties": {"q": inner}, "$defs": {"x": schema}}
        compiled(bytes_alone(), whole)


HARD: list[tuple[str, Any]] = [
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("propertyNames", {**obj(a=TEXT), "propertyNames": {"minLength": 3}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("not", {"type": "string", "not": {"const": "a"}}),
    ("if", {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    ("if", {"type": "number", "if": {"type": "integer"}, "then": {"minimum": 1}}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
]


@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_be_forced_is_named(path: str) -> None:
    """By the function and the key, and for a forced call alone."""
    key, schema = HARD[0]
    place = {CHAT: ("function", "parameters"), MESSAGES: ("input_schema",), RESPONSES: ("parameters",)}[path]
    asked = json.loads(json.dumps(body(path, "required")))
    inner = asked["tools"][0]
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = obj(a=schema)

    async def main() -> None:
        async with serving() as client:
            exchange = client.send(path, asked)
            told = json.dumps(await exchange.json())
            assert exchange.status == 400 and key in told and "weather" in told, told
            free = {**asked, "tool_choice": {"type": "auto"} if path == MESSAGES else "auto"}
            exchange = client.send(path, free)
            await exchange.json()
            assert exchange.status == 200

    run(main)
    for key, schema in HARD:
        with pytest.raises(OutpaceError, match=key):
            compiled(bytes_alone(), obj(a=schema))


@pytest.mark.parametrize("form", [Coder(), Glm(), Dsml()], ids=str)
@pytest.mark.parametrize("key", ["$ref", "$recursiveRef"])
def test_references_to_the_whole_schema_mean_it_in_each_value(form: Pairs, key: str) -> None:
    """Of formats whose values are documents of their own."""
    tree = obj(**{"v/é": {"type": "array", "items": {key: "#"}}})
    start, end = form._around("read")
    for value, good in (("[]", True), ('[{"v/é":[]}]', True), ("[[]]", False), ("[1]", False)):
        pair = f"{form.opens}v/é{form._heads(False)}{value}{form._tail}"
        assert allows(form.grammar([Signature("read", tree)], literal), start + pair + end) is good, value


def test_values_that_refer_to_too_much_are_refused() -> None:
    """Each repeats the whole, which a client could make as long as it likes."""
    many = {f"a{number}": {"$ref": "#"} for number in range(1000)}
    free = {**obj(**{key: {} for key in many}), "$defs": {"x": {"const": "a" * 10_000}}}
    for schema in (obj(**many), free):
        with pytest.raises(Refused, match="cannot be forced: too long a schema"):
            Coder().grammar([Signature("read", schema)], literal)


OWN = "kim@example.org <tool_call> <|channel|> {} %s \\1 \"' \N{GREEK SMALL LETTER PI}"


@pytest.mark.parametrize("form", [form for form, _, _ in WRITTEN])
def test_a_clients_texts_stay_as_they_are(form: CallFormat) -> None:
    """In keys, enumerations, constants and patterns, whatever they are spelt like."""
    key = "@type" if type(form).__name__ != "Gemma" else "type"
    schema = obj(
        **{key: {"const": OWN}, "b": {"enum": ["@here"]}, "c": {"type": "array", "items": {"const": "@"}}}
    )
    functions = [Signature("a", obj(x={"const": "@"})), Signature("read", schema)]
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, form.grammar(functions, literal), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found = bytearray()
    while not matcher.is_stopped():
        forced = matcher.compute_ff_tokens()
        if not forced:  # a choice: the function's name, or the end of the list
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
            forced = [max(allowed, key=lambda byte: (byte == ord("r"), byte == ord("]"), byte))]
        assert matcher.consume_tokens(forced)
        found += bytes(forced)
    text = found.decode()
    inner = text[len(form.begin) :].removesuffix(form.end)
    (call,) = form.read(inner, {one.name: one for one in functions})
    given = json.loads(call.arguments)
    assert call.name == "read" and (given[key], given["b"]) == (OWN, "@here"), text


def test_zods_records_beside_a_good_tool() -> None:
    """What Claude Code sends of them, in a forced call of either."""
    record = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"env": {"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT}},
        "additionalProperties": False,
    }
    asked = body(MESSAGES, "required")
    asked["tools"] = [*asked["tools"], {"name": "start", "input_schema": record}]

    async def main() -> None:
        async with serving() as client:
            found = await client.send(MESSAGES, asked).json()
            assert answered(MESSAGES, found)[1], found

    run(main)


def test_schemas_that_list_their_keys() -> None:
    shut = {"additionalProperties": False}
    for schema in (
        {**obj(a=TEXT), **shut},
        {"enum": [{"a": 1}]},
        {"anyOf": [TEXT, {**obj(a={"type": "array", "items": TEXT}), **shut}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {**obj(), **shut}}},
        False,
    ):
        assert lists_keys(schema), schema
    for schema in (
        obj(a=TEXT),
        {},
        True,
        {"type": "array"},
        {**obj(a={}), **shut},
        {**obj(), **shut, "patternProperties": {"^a": TEXT}},
        {"anyOf": [TEXT, obj(a=TEXT)]},
        {"$ref": "#/$defs/x", "$defs": {"x": obj()}},
    ):
        assert not lists_keys(schema), schema


def keys_of(text: str) -> list[list[str]]:
    """The keys of each object in a JSON text, inner ones first."""
    seen = list[list[str]]()

    def kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen.append([key for key, _ in pairs])
        return dict(pairs)

    json.loads(text, object_pairs_hook=kept)
    return seen


@pytest.mark.parametrize("path", PATHS)
def test_no_key_comes_twice(path: str) -> None:
    """Of those that a schema does not list either, in a forced call and in a schema of the answer."""
    inner = {"type": "object", "patternProperties": {"^[ab]{1,2}$": {"enum": [1]}}, "minProperties": 5}
    schema = {**obj(x={**inner, "additionalProperties": False}), "additionalProperties": False}
    asked = json.loads(json.dumps(body(path, "required")))
    tool = asked["tools"][0]
    tool.get("function", tool)["input_schema" if path == MESSAGES else "parameters"] = schema
    asked["max_output_tokens" if path == RESPONSES else "max_tokens"] = 200

    async def main() -> None:
        async with serving() as client:
            found = await client.send(path, asked).json()
            texts = [arguments for _, arguments in answered(path, found)[1]]
            if path == CHAT:
                form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
                found = await client.chat(response_format=form, max_tokens=200).json()
                texts.append(found["choices"][0]["message"]["content"])
            for text in texts:
                seen = keys_of(text)
                assert len(seen[0]) >= 5 and all(len(set(keys)) == len(keys) for keys in seen), text

    run(main)
