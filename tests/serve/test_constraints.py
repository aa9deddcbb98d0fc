"""Constraints under the names of OpenAI, vLLM and llama-server: what they allow, drafted and plain."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from serving import FORM, PERSON, Client, Exchange, run, serving


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


def _chat(client: Client, **more: Any) -> Exchange:
    return client.chat(**more)


def _text(client: Client, **more: Any) -> Exchange:
    return client.complete("Once", **more)


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
            tools = [{"type": "function", "function": {"name": "paint", "parameters": PERSON}}]
            error = (await client.chat(guided_regex="a", tools=tools, tool_choice="required").json())["error"]
            assert error["param"] == "guided_regex" and "a required tool" in error["message"]

    run(main)
