"""Tools in every API: shown to the model, called, answered, over several turns, as agents send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from calling import (
    ALTERNATING,
    CHAT,
    FUNCTION,
    HERMES,
    MESSAGES,
    PATHS,
    RESPONSES,
    answered,
    body,
    counted,
    prompt_of,
    streamed,
    with_template,
)
from outpace.serve.dialogue import Dialogue
from outpace.serve.errors import Refused
from outpace.serve.request import Defaults
from parts import first, in_turn
from serving import STORY, engine_text, model, run, serving, story

WEATHER = {"type": "object", "properties": {"day": {"$ref": "#/$defs/day"}}, "required": ["day"]}
WEATHER |= {"additionalProperties": False, "$defs": {"day": {"enum": ["today", "tomorrow"]}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a day", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
CHANNELS = (  # as gpt-oss's template: one call of a turn, which its result follows
    "{% if tools %}functions: {% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}"
    "{% set last = namespace(name='') %}{% for m in messages %}{% if m.tool_calls %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}<|start|>assistant to=functions."
    "{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize(("path", "template"), in_turn(PATHS, [HERMES, ALTERNATING, ""]))
def test_tools_are_in_the_prompt_whatever_the_template(path: str, template: str) -> None:
    loaded = with_template(template) if template else model()

    async def main() -> None:
        async with serving(loaded=loaded) as client:
            without = body(path)
            del without["tools"], without["tool_choice"]
            bare, shown, off = [
                counted(path, await client.send(path, one).json())
                for one in (without, body(path), body(path, "none"))
            ]
            assert bare == off and shown > bare + 40

    run(main)


@pytest.mark.parametrize(("path", "template"), in_turn(PATHS, ["{{ tools }}{{ messages }}", HERMES, ""]))
def test_a_call_that_must_be_made_is_whole_and_streamed(path: str, template: str) -> None:
    loaded = with_template(template) if template else model()

    async def main() -> None:
        async with serving(loaded=loaded) as client:
            for choice in ("required", "named"):
                found = await client.send(path, body(path, choice)).json()
                text, [(name, arguments)] = answered(path, found)
                assert (text, name) == ("", "weather")
                given = json.loads(arguments)
                assert given["day"] in ("today", "tomorrow") and set(given) <= {"day", "count"}
                assert await streamed(client, path, body(path, choice)) == ("", [("weather", arguments)])
            plain = await client.send(path, body(path, "required", speculation="off")).json()
            assert answered(path, plain) == answered(path, found)

    run(main)


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_without_a_call_is_the_engines_text(path: str) -> None:
    async def main() -> None:
        loaded = with_template(HERMES)
        shown, options = Dialogue(loaded).prepared(STORY, [{"type": "function", "function": FUNCTION}])
        _, text = engine_text(loaded.encode_chat(shown, **options), max_new_tokens=20)
        assert text
        async with serving(loaded=loaded) as client:
            limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
            asked = body(path, **{limit: 20})
            assert answered(path, await client.send(path, asked).json()) == (text, [])
            assert await streamed(client, path, asked) == (text, [])

    run(main)


def test_thinking_sets_the_templates_variable() -> None:
    async def main() -> None:
        async with serving(loaded=with_template(HERMES)) as client:
            texts = {}
            for kind in ("adaptive", "disabled", "enabled"):
                asked = {**body(MESSAGES), "thinking": {"type": kind}}
                texts[kind] = client.service.model.tokenizer.decode(prompt_of(client, asked))
            assert texts["enabled"].endswith("<think>") and texts["disabled"].endswith("</think>")
            assert texts["adaptive"].endswith("assistant:")
            found = await client.chat(max_tokens=5, reasoning_effort="high").json()
            message = found["choices"][0]["message"]  # the prompt ends in the mark that begins reasoning
            assert message["content"] == "" and message["reasoning_content"]
            *chunks, _ = await client.chat(max_tokens=5, reasoning_effort="high", stream=True).events()
            pieces = [chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in chunks]
            assert "".join(pieces) == message["reasoning_content"]
            asked = {**body(MESSAGES), "thinking": {"type": "enabled"}, "max_tokens": 5}
            found = await client.send(MESSAGES, asked).json()
            assert [block["type"] for block in found["content"]] == ["thinking"]
            asked = {**body(RESPONSES), "reasoning": {"effort": "high"}, "max_output_tokens": 5}
            found = await client.send(RESPONSES, asked).json()
            assert [item["type"] for item in found["output"]] == ["reasoning"]

    run(main)


def test_a_limit_of_an_answer_is_what_the_prompt_leaves() -> None:
    prompts = [[0] * 60, [0] * 20]
    assert (
        Defaults({}, 100).most_tokens(prompts, 32_000) == 40 == Defaults({}, 100).most_tokens(prompts, None)
    )
    assert Defaults({}, 100, cut=False).most_tokens(prompts, 40) == 40
    with pytest.raises(Refused, match="41 of the answer"):
        Defaults({}, 100, cut=False).most_tokens(prompts, 41)


@pytest.mark.parametrize("path", first(1, PATHS))
def test_an_answer_beyond_the_context_is_cut_to_what_is_left(path: str) -> None:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    asked = {"input" if path == RESPONSES else "messages": STORY, "temperature": 0, limit: 32000}
    ends = {CHAT: "length", MESSAGES: "max_tokens", RESPONSES: "incomplete"}

    def end(found: dict[str, Any]) -> Any:
        choice = found.get("choices", [{}])[0]
        return found.get("status") or found.get("stop_reason") or choice.get("finish_reason")

    async def main() -> None:
        long = [{"role": "user", "content": "ab " * 1980}]
        room = model().target.context - len(model().encode_chat(long))
        async with serving() as client:
            filled = {**asked, "input" if path == RESPONSES else "messages": long}
            found = await client.send(path, filled).json()
            emitted = found["usage"].get("completion_tokens", found["usage"].get("output_tokens"))
            assert emitted <= room and (emitted < room or end(found) == ends[path])
            never = {
                **filled,
                "input" if path == RESPONSES else "messages": [{**long[0], "content": "ab " * 3000}],
            }
            exchange = client.send(path, never)
            assert "context" in (await exchange.json())["error"]["message"] and exchange.status == 400
        async with serving(cut=False) as client:
            exchange = client.send(path, asked)
            error = (await exchange.json())["error"]
            assert exchange.status == 400 and "32000 of the answer" in error["message"]
            short = client.send(path, {**asked, limit: 4})
            assert end(await short.json()) == ends[path] and short.status == 200

    run(main)


USED = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "a"}
GOT = {"type": "tool_result", "tool_use_id": "a", "content": "c"}
MISPLACED = [
    ({"role": role, "content": [{"type": "text", "text": "a"}, block]}, f"type {block['type']} is not taken")
    for role, blocks in (("user", (USED, THOUGHT)), ("assistant", (GOT,)), ("system", (USED, GOT, THOUGHT)))
    for block in blocks
]


def allowing(path: str, mode: str, *names: str) -> dict[str, Any]:
    """Two tools, of which an answer may or must call one of these."""
    own: dict[str, Any] = {"parameters": {"type": "object", "properties": {"a": {"const": 1}}}}
    tools: list[Any] = [{"name": name, **own} for name in ("now", "weather")]
    few: list[Any] = [{"name": name} for name in names]
    if path == CHAT:
        tools, few = ([{"type": "function", "function": one} for one in some] for some in (tools, few))
        choice: dict[str, Any] = {"allowed_tools": {"mode": mode, "tools": few}}
    else:
        tools, few = ([{"type": "function", **one} for one in some] for some in (tools, few))
        choice = {"mode": mode, "tools": [*few, {"type": "web_search"}]}
    return {"tools": tools, "tool_choice": {"type": "allowed_tools", **choice}}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_of_allowed_tools_one_is_called(path: str) -> None:
    async def main() -> None:
        async with serving(loaded=with_template(HERMES)) as client:
            sizes = []
            for name in ("now", "weather"):
                for mode in ("required", "auto"):
                    asked = {**body(path), **allowing(path, mode, name)}
                    found = await client.send(path, asked).json()
                    sizes.append(found["usage"]["prompt_tokens" if path == CHAT else "input_tokens"])
                    if mode == "required":
                        assert [called for called, _ in answered(path, found)[1]] == [name]
            assert sizes[0] == sizes[2] > max(sizes[1], sizes[3])  # for a choice alone, the prompt stays

    run(main)


def test_what_contradicts_itself_is_refused() -> None:
    tool = {"name": "a", "input_schema": {"type": "object"}}
    wrong: list[tuple[str, dict[str, Any], str]] = [
        (MESSAGES, {"tools": [tool, tool]}, "two tools"),
        (MESSAGES, {"tools": [tool], "tool_choice": {"type": "tool", "name": "b"}}, "not among tools"),
        (MESSAGES, {"tools": [tool], "tool_choice": {"type": "tool"}}, "needs a name"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "not among tools"),
        (MESSAGES, {"tools": [{"type": "a b"}]}, "pattern"),
        *((MESSAGES, {"messages": [one]}, said) for one, said in MISPLACED),
        (MESSAGES, {"messages": [{"role": "assistant", "content": []}]}, "conversation is empty"),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}, "conversation is empty"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "send the whole conversation"),
        (RESPONSES, {"conversation": "conv_1"}, "send the whole conversation"),
        (RESPONSES, {"background": True}, "not done here"),
        (RESPONSES, {"tool_choice": "required", "tools": [{"type": "web_search"}]}, "not among tools"),
        (RESPONSES, allowing(RESPONSES, "required", "other"), "'other', which is not among tools"),
        (CHAT, allowing(CHAT, "auto", "weather", "other"), "'other', which is not among tools"),
        (CHAT, allowing(CHAT, "auto"), "at least 1 item"),
    ]

    async def main() -> None:
        async with serving() as client:
            for path, more, said in wrong:
                own: dict[str, Any] = (
                    {"input": "a"} if path == RESPONSES else {"messages": STORY, "max_tokens": 2}
                )
                exchange = client.send(path, {**own, **more})
                error = (await exchange.json())["error"]
                assert exchange.status == 400 and said in error["message"], (more, error)

    run(main)


def test_the_story_is_as_without_tools() -> None:
    """A conversation without tools is what the template makes of it, whatever it can show."""
    assert Dialogue(model()).prepared(STORY, ()) == (STORY, {})
    assert model().encode_chat(STORY) == story()


def test_models_say_what_they_can() -> None:
    async def main() -> None:
        for loaded, tools, reasoning in (
            (model(), "preamble", False),
            (with_template(HERMES), "template", True),
            (with_template(None), None, False),
        ):
            async with serving(loaded=loaded) as client:
                can = (await client.get("/v1/models"))["data"][0]["capabilities"]
                assert (can["tools"], can["reasoning"]) == (tools, reasoning)
                assert can["context"] == 2048 and can["images"] is False and can["exact"] is True
                assert can["drafters"] == client.service.drafters.names

    run(main)


def test_drafts_come_from_the_conversations_earlier_turns() -> None:
    """The default drafter proposes what the assistant said before, of which it remembers nothing else."""

    async def main() -> None:
        async with serving("suffix:memory=0") as client:
            asked = {"max_tokens": 24, "speculation": True, "speculation_metrics": True}
            first = await client.chat(**asked).json()
            said = first["choices"][0]["message"]["content"]
            turns = [*STORY, {"role": "assistant", "content": said}, *STORY]
            bias = {str(token): 100 for token in model().plain_tokens(said)}
            found = await client.chat(messages=turns, logit_bias=bias, **asked).json()
            plain = await client.chat(
                messages=turns, logit_bias=bias, max_tokens=24, speculation="off"
            ).json()
            assert found["choices"] == plain["choices"]
            counts = found["metrics"]["speculative_decoding"]
            assert counts["num_draft_tokens"] > 0 and counts["num_accepted_draft_tokens"] > 0

    run(main)


def test_harmony_shows_each_call_with_its_result() -> None:
    """A template that has one call of a turn gets a turn for each."""
    dialogue = Dialogue(with_template(CHANNELS))
    calls = [
        {"id": one, "type": "function", "function": {"name": one, "arguments": f'{{"x": "{one}"}}'}}
        for one in ("first", "second")
    ]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": one["id"], "content": f"of {one['id']}"} for one in calls),
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    found, options = dialogue.prepared(turns, tools)
    text = with_template(CHANNELS).render(found, **options)
    places = [text.index(f"functions.{one['id']} to=assistant<|channel|>commentary") for one in calls]
    assert places == sorted(places) and text.count("<|channel|>analysis<|message|>Hm.<|end|>") == 1
    assert all(f'"of {one["id"]}"' in text and f'"{one["id"]}' in text for one in calls)
    assert dialogue.thinks and dialogue.harmony

    async def main() -> None:
        async with serving(loaded=with_template(CHANNELS)) as client:
            assert client.service.capabilities["reasoning"] is True
            for path in PATHS:
                text, [(name, arguments)] = answered(
                    path, await client.send(path, body(path, "named")).json()
                )
                assert (text, name) == ("", "weather") and "day" in json.loads(arguments)
                given = await streamed(client, path, body(path, "named"))
                assert given == ("", [("weather", arguments)])
            found = await client.send(CHAT, body(CHAT, response_format={"type": "json_object"})).json()
            assert json.loads(answered(CHAT, found)[0]) is not None  # a schema's answer has no channels

    run(main)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_must_be_called_is(choice: Any) -> None:
    async def main() -> None:
        async with serving() as client:
            asked = {"tools": TOOLS[:1], "tool_choice": choice, "max_tokens": 60}
            (found,) = (await client.chat(**asked).json())["choices"]
            (call,) = found["message"]["tool_calls"]
            assert found["message"]["content"] is None and found["finish_reason"] == "tool_calls"
            assert call["type"] == "function" and call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["day"] in ("today", "tomorrow")
            *chunks, _ = await client.chat(stream=True, **asked).events()
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
            assert calls[0]["function"]["name"] == "weather" and calls[0]["id"].startswith("call_")
            assert "".join(one["function"]["arguments"] for one in calls) == call["function"]["arguments"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    run(main)


def test_tools_are_read_by_the_tokenizers_own_template(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        tokenizer = model().tokenizer
        calls = [
            {"type": "function", "function": {"name": "time", "arguments": {"zone": zone}}}
            for zone in ("utc", "cet")
        ]
        parsed = {"role": "assistant", "content": "Well.", "tool_calls": calls}
        seen = []

        def parse(ids: list[int], prefix: list[int], tools: Any) -> Any:
            seen.append(
                (len(ids), prefix[-9:] == model().encode_chat(STORY)[-9:], tools[0]["function"]["name"])
            )
            return parsed

        monkeypatch.setattr(tokenizer, "response_template", {"x": 1}, raising=False)
        monkeypatch.setattr(tokenizer, "parse_response", parse, raising=False)
        async with serving() as client:
            asked = {"tools": TOOLS, "max_tokens": 5}
            (found,) = (await client.chat(**asked).json())["choices"]
            assert found["message"]["content"] == "Well." and found["finish_reason"] == "length"
            assert json.loads(found["message"]["tool_calls"][0]["function"]["arguments"]) == {"zone": "utc"}
            assert len(found["message"]["tool_calls"]) == 2
            (alone,) = (await client.chat(parallel_tool_calls=False, **asked).json())["choices"]
            assert len(alone["message"]["tool_calls"]) == 1
            *chunks, _ = await client.chat(stream=True, **asked).events()
            _, text, *calls = [c["choices"][0]["delta"] for c in chunks[:-1]]
            assert text["content"] == "Well." and len(calls) == 2
            assert [call["tool_calls"][0]["function"]["name"] for call in calls] == ["time", "time"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            text = (await client.chat(tool_choice="none", **asked).json())["choices"][0]
            assert text["finish_reason"] == "length"
        assert seen == [(5, True, "weather")] * 3

    run(main)
