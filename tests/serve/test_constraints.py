"""Constraints under the names of OpenAI, vLLM and llama-server: what they allow, drafted and plain."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from calling import answered
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from serving import FORM, PERSON, STORY, Client, Exchange, model, run, serving


def _is_person(text: str) -> bool:
    found = json.loads(text)
    return found["favourite_colour"] in ("red", "green") and 0 <= found["number_of_children"] <= 9


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


PATTERN = r"[a-c]{3,9}/\d{4}"
CHOICES = ['a "red" one', "green", "grün\n"]
GBNF = 'root ::= "(" root ")" | [a-c]{2,5} "."'
NESTED = r"(\(*)[a-c]{2,5}\.(\)*)"
LARK = "start: WORD\nWORD: /[a-c]{2,5}\\./"
SHAPES: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"structured_outputs": {"json": PERSON}}, _is_person),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, _is_person),
    (
        {"structured_outputs": {"json_object": True}, "seed": 1},
        lambda text: isinstance(json.loads(text), dict),
    ),
    ({"structured_outputs": {"regex": PATTERN}}, _matches(PATTERN)),
    ({"structured_outputs": {"regex": f"^{PATTERN}$"}}, _matches(PATTERN)),
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    ({"structured_outputs": {"grammar": GBNF}}, _matches(NESTED)),
    ({"structured_outputs": {"grammar": LARK}}, _matches(r"[a-c]{2,5}\.")),
    ({"guided_json": PERSON}, _is_person),
    ({"guided_regex": PATTERN}, _matches(PATTERN)),
    ({"guided_choice": CHOICES}, CHOICES.__contains__),
    ({"guided_grammar": GBNF}, _matches(NESTED)),
    ({"grammar": GBNF}, _matches(NESTED)),
    ({"json_schema": PERSON}, _is_person),
    ({"response_format": FORM}, _is_person),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, _is_person),
]


def _texts(found: Any) -> list[str]:
    return [one["message"]["content"] if "message" in one else one["text"] for one in found["choices"]]


GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 3, "n": 2}


def test_each_name_constrains_and_drafts_change_no_token() -> None:
    async def main() -> None:
        async with serving("suffix", running=4) as client:
            for place, (more, holds) in enumerate(SHAPES):
                for ask, how in zip((_chat, _text), (GREEDY, SAMPLED)[:: 1 - 2 * (place % 2)], strict=True):
                    asked = {"max_tokens": 40, "return_token_ids": True, **more, **how}
                    drafted = await ask(client, **asked).json()
                    plain = await ask(client, **asked, speculation="off").json()
                    assert drafted["choices"] == plain["choices"], (more, how)
                    for text, choice in zip(_texts(drafted), drafted["choices"], strict=True):
                        assert choice["finish_reason"] == "length" or holds(text), (more, text)
                    assert any(choice["finish_reason"] == "stop" for choice in drafted["choices"]), more
                    if place % 4:
                        continue
                    *chunks, _ = await ask(client, **asked, stream=True).events()
                    streamed = dict[int, str]()
                    for chunk in (one for part in chunks for one in part["choices"]):
                        said = chunk["text"] if "text" in chunk else chunk["delta"].get("content") or ""
                        streamed[chunk["index"]] = streamed.get(chunk["index"], "") + said
                    assert [streamed[index] for index in sorted(streamed)] == _texts(drafted)

    run(main, 300)


SPELT = "x <|endoftext|> y"
KEYS = {"type": "object", "propertyNames": {"pattern": "^[ab]{1,2}$"}, "additionalProperties": {"const": 1}}
# Constraints, and what their texts are: like tokens, of schemas with keys of no effect, of unlisted keys.
EITHER: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"choice": [SPELT]}, SPELT.__eq__),
    ({"json": {"enum": [SPELT]}}, json.dumps(SPELT).__eq__),
    ({"regex": r"x <\|endoftext\|> y"}, SPELT.__eq__),
    ({"grammar": 'root ::= "x " "<|endoftext|>" " y"'}, SPELT.__eq__),
    (
        {
            "json": {
                **PERSON,
                "propertyNames": {"type": "string"},
                "uniqueItems": False,
                "dependentRequired": {},
            }
        },
        _is_person,
    ),
    ({"json": {**KEYS, "minProperties": 4, "maxProperties": 4}}, lambda text: len(json.loads(text)) == 4),
]


@pytest.mark.parametrize("way", ["library", "server"])
def test_a_constraint_holds_in_the_library_and_in_the_server(way: str) -> None:
    texts = list[str]()
    if way == "library":
        engine = Engine(model().target, "suffix", tokenizer=model().tokenizer)
        for wanted, _ in EITHER:
            params = SamplingParams(max_new_tokens=90, structured_outputs=wanted)
            texts.append(engine.generate([model().tokens("Once")], params)[0].text or "")

    async def main() -> None:
        async with serving("suffix") as client:
            for wanted, _ in EITHER:
                asked = {"structured_outputs": wanted, "max_tokens": 90, "temperature": 0}
                texts.extend(_texts(await _text(client, **asked).json()))

    if way == "server":
        run(main)
    for (wanted, holds), text in zip(EITHER, texts, strict=True):
        assert holds(text), (wanted, text)


def _chat(client: Client, **more: Any) -> Exchange:
    return client.chat(**more)


def _text(client: Client, **more: Any) -> Exchange:
    return client.complete("Once", **more)


PAINT = {"type": "function", "function": {"name": "paint", "parameters": PERSON}}
USE = {"name": "paint", "input_schema": PERSON}
FLAT = {"type": "json_schema", "name": "text", "schema": {"const": "text"}}
# A format, and a tool that must be called, in each API.
CALLED: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"tools": [PAINT], "tool_choice": "required", "response_format": FORM, "messages": STORY},
    ),
    (
        "/v1/messages",
        {"tools": [USE], "tool_choice": {"type": "any"}, "messages": STORY, "max_tokens": 60}
        | {"output_config": {"format": {"type": "json_schema", "schema": {"const": "text"}}}},
    ),
    (
        "/v1/responses",
        {"tools": [{"type": "function", "name": "paint", "parameters": PERSON}], "text": {"format": FLAT}}
        | {"tool_choice": "required", "input": STORY},
    ),
]


@pytest.mark.parametrize(("path", "asked"), CALLED)
def test_a_format_is_of_texts_and_a_tool_that_must_be_called_is_called(
    path: str, asked: dict[str, Any]
) -> None:
    async def main() -> None:
        async with serving() as client:
            text, calls = answered(path, await client.send(path, {"temperature": 0, **asked}).json())
            assert not text and [name for name, _ in calls] == ["paint"] and _is_person(calls[0][1])

    run(main)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {}}, "structured_outputs", "needs json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exclude each other"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
    ({"guided_regex": "["}, "guided_regex", "unclosed"),
    ({"guided_regex": "a\\"}, "guided_regex", "backslash"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "guided_regex"),
    ({"guided_regex": "a", "response_format": FORM}, "response_format", "guided_regex"),
    ({"guided_json": "nope"}, "guided_json", "not JSON"),
    ({"guided_json": "[1]"}, "guided_json", "a JSON object"),
    ({"guided_json": {"type": "nothing"}}, "guided_json", "nothing"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_choice": [""]}, "guided_choice", "guided_choice.0"),
    ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
    ({"grammar": "start: x"}, "grammar", "::= is expected"),
    ({"grammar": 'root ::= a root | "b"\na ::= "a"+'}, "grammar", "the end of a part"),
    ({"json_schema": {"type": "nothing"}}, "json_schema", "nothing"),
]
# The compiler takes seconds to find out.
HUGE: list[tuple[dict[str, Any], str, str]] = [({"guided_regex": "(x{1000}){1000}"}, "guided_regex", "")]


def test_what_cannot_be_expressed_is_refused_by_its_name() -> None:
    async def main() -> None:
        async with serving() as client:
            for more, param, said in REFUSED + HUGE:
                for ask in (_chat, _text) if (more, param, said) in REFUSED else (_text,):
                    exchange = ask(client, max_tokens=8, **more)
                    error = (await exchange.json())["error"]
                    assert exchange.status == 400 and said in error["message"], (more, error)
                    assert error["param"] in (param, None), (more, error)
            error = (await client.chat(guided_regex="a", tools=[PAINT], tool_choice="required").json())[
                "error"
            ]
            assert error["param"] == "guided_regex" and "a required tool" in error["message"]

    run(main)


def test_a_schema_is_obeyed_and_what_it_forces_is_drafted() -> None:
    async def main() -> None:
        async with serving("none") as client:
            asked = {"response_format": FORM, "max_tokens": 80, "return_token_ids": True}
            plain = await client.chat(speculation="off", speculation_metrics=True, **asked).json()
            found = await client.chat(speculation_metrics=True, **asked).json()
            assert plain["choices"] == found["choices"]
            person = json.loads(found["choices"][0]["message"]["content"])
            assert set(person) == set(PERSON["properties"])
            assert found["choices"][0]["finish_reason"] == "stop"
            measured = [one["metrics"]["speculative_decoding"] for one in (plain, found)]
            assert measured[0]["num_draft_tokens"] == 0
            assert measured[1]["num_spec_steps"] < measured[0]["num_spec_steps"] * 0.8
            *chunks, _ = await client.chat(stream=True, **asked).events()
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert text == found["choices"][0]["message"]["content"]

    run(main)


def test_each_choice_has_a_grammar_of_its_own_and_sampling_obeys() -> None:
    async def main() -> None:
        async with serving() as client:
            found = await client.chat(
                response_format=FORM, n=3, temperature=1.5, seed=1, max_tokens=80, ignore_eos=True
            ).json()
            people = [json.loads(choice["message"]["content"]) for choice in found["choices"]]
            assert all(person["favourite_colour"] in ("red", "green") for person in people)
            assert len({json.dumps(person) for person in people}) > 1

    run(main)


def test_any_object() -> None:
    async def main() -> None:
        async with serving() as client:
            form = {"type": "json_object"}
            found = await client.chat(response_format=form, max_tokens=6, return_token_ids=True).json()
            assert found["choices"][0]["message"]["content"].startswith("{")

    run(main)
