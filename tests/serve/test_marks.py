"""Marks of calls and of reasoning as text, as added tokens and as special ones: none makes a difference."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from typing import Any

import pytest

from calling import (
    ARGUMENTS,
    CALLED,
    CHAT,
    FUNCTIONS,
    HERMES,
    IDS,
    MESSAGES,
    PATHS,
    RESPONSES,
    WRITTEN,
    answered,
    body,
    read,
    streamed,
)
from marks_of import KINDS, Kind, saying, with_marks
from outpace.core import StreamedToken
from outpace.grammars.compiling import compiled
from outpace.serve.answers import Answer, Manner
from outpace.serve.calls import CallFormat
from outpace.serve.dialogue import Dialogue
from outpace.serve.grammar import Grammars
from outpace.serve.harmony import Harmony, HarmonyAnswer
from outpace.serve.totals import Turns
from outpace.text import TextStream
from parts import in_turn
from serving import STORY, Client, run, serving

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FORMS = [*WRITTEN, (Harmony(), CALLED, "<|channel|>final<|message|>")]
SPELT = ["x <|endoftext|> y", "a <tool_call> b", "</think>"]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"day": "today"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "text", "template", "kind"),
    [(*one, kind) for one, kind in product(FORMS, KINDS[1:])],
    ids=[f"{name}-{kind}" for name, kind in product([*IDS, "Harmony"], KINDS[1:])],
)
def test_marks_that_are_tokens_in_every_format(
    form: CallFormat, text: str, template: str, kind: Kind
) -> None:
    """The grammar forces a call in the tokens of the template, and the answer is read from them."""
    loaded = with_marks(f"{{{{ tools }}}}{{# {template} #}}{{{{ messages }}}}", form.marks, kind)
    dialogue, tokenizer = Dialogue(loaded), loaded.tokenizer
    assert dialogue.format == form and set(dialogue.tokens) == set(form.marks)
    assert set(dialogue.silent) == (set() if kind == "added" else set(dialogue.tokens.values()))
    tokens = loaded.plain_tokens(text)
    assert any(mark in text for mark in form.marks) == bool(set(dialogue.tokens.values()) & set(tokens))
    grammars = Grammars(tokenizer, 4096, frozenset([0]), Turns(1), dialogue.tokens.values())
    functions = list(FUNCTIONS.values())
    matcher = compiled(grammars.constraints().tokenizer, form.grammar(functions, dialogue.term))
    assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_stopped()
    for forced, size in product((False, True), (1, 4, 1000)):
        manner = Manner(form, FUNCTIONS, forced, marks=dialogue.silent)
        answer = (HarmonyAnswer if isinstance(form, Harmony) else Answer)(
            manner, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
        )
        stream, said = TextStream(tokenizer), []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            for token in part:
                stream.push(token)
            texts = [""] * (len(part) - 1) + [stream.release(final=start + size >= len(tokens))]
            said += answer.push(
                [StreamedToken(*one) for one in zip(part, [1] * len(part), texts, strict=True)]
            )
        assert read(said + answer.end(True)) == ("", [("read", ARGUMENTS)]), (forced, size)
    asyncio.run(grammars.close())


def thought(path: str, found: dict[str, Any]) -> str:
    """The reasoning of a complete response."""
    if path == CHAT:
        return str(found["choices"][0]["message"].get("reasoning_content", ""))
    if path == MESSAGES:
        return "".join(one["thinking"] for one in found["content"] if one["type"] == "thinking")
    items = (one for one in found["output"] if one["type"] == "reasoning")
    return "".join(one["content"][0]["text"] for one in items)


@pytest.mark.parametrize(("path", "kind"), in_turn(PATHS, KINDS))
def test_calls_and_reasoning_in_auto(path: str, kind: Kind) -> None:
    loaded = with_marks(HERMES, MARKS, kind)
    text = loaded.plain_tokens(f"<think>Hm.</think>\n\nWell. {CALL}\n{CALL}")

    async def main() -> None:
        async with serving(loaded=loaded, change=saying([*text, 0])) as client:
            asked = body(path, **{"max_output_tokens" if path == RESPONSES else "max_tokens": 200})
            expected = ("Well. ", [("weather", '{"day": "today"}')] * 2)
            found = await client.send(path, asked).json()
            assert answered(path, found) == expected and thought(path, found) == "Hm."
            assert await streamed(client, path, asked) == expected
            if path != MESSAGES:
                name = "completion" if path == CHAT else "output"
                counted = found["usage"][f"{name}_tokens_details"]["reasoning_tokens"]
                assert counted == len(loaded.plain_tokens("Hm."))

    run(main)


@pytest.mark.parametrize(("path", "kind"), in_turn(PATHS, KINDS))
def test_a_call_that_must_be_made(path: str, kind: Kind) -> None:
    async def main() -> None:
        async with serving(loaded=with_marks(HERMES, MARKS, kind)) as client:
            for choice in ("required", "named"):
                found = await client.send(path, body(path, choice)).json()
                text, [(name, arguments)] = answered(path, found)
                assert (text, name) == ("", "weather") and "day" in json.loads(arguments)
                assert await streamed(client, path, body(path, choice)) == ("", [(name, arguments)])
            plain = await client.send(path, body(path, "named", speculation="off")).json()
            assert answered(path, plain) == answered(path, found)

    run(main)


@pytest.mark.parametrize(("kind", "spelt"), in_turn(KINDS, SPELT))
def test_texts_that_are_spelt_like_tokens(kind: Kind, spelt: str) -> None:
    loaded = with_marks(HERMES, MARKS, kind)
    schema = {"type": "object", "properties": {"a": {"enum": [spelt]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "keep", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    marks = set(Dialogue(loaded).tokens.values()) | {0}

    async def main() -> None:
        async with serving(loaded=loaded) as client:
            for speculation in ("off", "prompt_lookup"):
                asked = {"max_tokens": 90, "speculation": speculation, "return_token_ids": True}
                asked |= {"reasoning_effort": "none"}
                found = await client.chat(**asked, response_format=form).json()
                (choice,) = found["choices"]
                assert choice["finish_reason"] == "stop"
                assert json.loads(choice["message"]["content"]) == {"a": spelt}
                assert marks.isdisjoint(choice["token_ids"][:-1])
                found = await client.chat(**asked, tools=[tool], tool_choice="required").json()
                assert [json.loads(one) for _, one in answered(CHAT, found)[1]] == [{"a": spelt}]

    run(main)


# -- reasoning, and then a constraint ----------------------------------------------------------------------


async def _both(client: Client, **asked: Any) -> dict[str, Any]:
    """A chat's choice, which is the same without drafts, and in a batch of two with its own seed."""
    found = await client.chat(**asked, return_token_ids=True).json()
    plain = await client.chat(**asked, return_token_ids=True, speculation="off").json()
    assert found["choices"] == plain["choices"] or _without_ids(found) == _without_ids(plain)
    choice: dict[str, Any] = found["choices"][0]
    two = await client.chat(**asked, return_token_ids=True, n=2).json()
    assert two["choices"][0]["token_ids"] == choice["token_ids"]
    return choice | {"usage": found["usage"]}


def _without_ids(found: dict[str, Any]) -> list[Any]:
    """Choices whose calls have no ids, which differ."""
    choices = json.loads(json.dumps(found["choices"]))
    for choice in choices:
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]
    return choices


@pytest.mark.parametrize(("kind", "budget"), in_turn(KINDS, [7, 0, 1]))
@pytest.mark.parametrize("begun", [True, False])
def test_a_constraint_begins_after_the_reasoning(kind: Kind, budget: int, begun: bool) -> None:
    loaded = with_marks(HERMES, MARKS, kind)
    opened = [] if begun else loaded.plain_tokens("<think>")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["red", "green"]}}}
    tool = body(CHAT)["tools"]

    async def main() -> None:
        async with serving(loaded=loaded, change=saying(opened)) as client:
            for asked in (
                {"response_format": form},
                {"tools": tool, "tool_choice": "required"},
                {"response_format": form, "temperature": 1.0, "seed": 5},
            ):
                given = {"max_tokens": 120, "thinking_token_budget": budget, **asked}
                given |= {"reasoning_effort": "high"} if begun else {}
                choice = await _both(client, **given)
                message = choice["message"]
                if "tools" in asked:
                    (call,) = message["tool_calls"]
                    assert not message["content"] and "day" in json.loads(call["function"]["arguments"])
                else:
                    assert json.loads(message["content"]) in ("red", "green")
                counts = choice["usage"]["completion_tokens_details"]
                assert counts["reasoning_tokens"] == budget
                inner = choice["token_ids"][len(opened) : len(opened) + budget]
                assert loaded.tokenizer.decode(inner) == message.get("reasoning_content", "")
                closing = loaded.plain_tokens("</think>")
                start = len(opened) + budget
                assert choice["token_ids"][start : start + len(closing)] == closing

    run(main)


@pytest.mark.parametrize(("path", "kind"), in_turn(PATHS, KINDS))
def test_a_budget_of_reasoning_in_every_api(path: str, kind: Kind) -> None:
    loaded = with_marks(HERMES, MARKS, kind)
    given: dict[str, dict[str, Any]] = {
        CHAT: {"messages": STORY, "max_tokens": 30, "reasoning_effort": "low", "thinking_budget": 5},
        MESSAGES: {
            "messages": STORY,
            "max_tokens": 30,
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
        RESPONSES: {
            "input": STORY,
            "max_output_tokens": 30,
            "reasoning": {"effort": "low", "max_tokens": 5},
        },
    }

    async def main() -> None:
        async with serving(loaded=loaded) as client:
            asked = {"temperature": 0, **given[path]}
            found = await client.send(path, asked).json()
            assert len(loaded.plain_tokens(thought(path, found))) == 5 and answered(path, found)[0]
            text, _ = await streamed(client, path, asked)
            assert text == answered(path, found)[0]
            plain = await client.send(path, {**asked, "speculation": "off"}).json()
            assert thought(path, plain) == thought(path, found)

    run(main)


def test_without_reasoning_a_constraint_begins_at_once() -> None:
    """Where the client wants none, or the prompt has ended it."""
    loaded = with_marks(HERMES, MARKS, "special")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["red", "green"]}}}

    async def main() -> None:
        async with serving(loaded=loaded, change=saying(loaded.plain_tokens("<think>"))) as client:
            found = await client.chat(max_tokens=30, reasoning_effort="none", response_format=form).json()
            (choice,) = found["choices"]
            assert json.loads(choice["message"]["content"]) in ("red", "green")
            assert "reasoning_content" not in choice["message"]
            for wrong in ({"thinking_budget": 3, "thinking_token_budget": 4}, {"thinking_budget": -2}):
                exchange = client.chat(**wrong)
                await exchange.json()
                assert exchange.status == 400

    run(main)
