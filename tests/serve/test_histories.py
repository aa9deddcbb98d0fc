"""Conversations as clients send them back: their dumps of our answers, and calls that were cut off."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.lib._parsing._completions import parse_chat_completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from outpace.engine.engine import Engine
from outpace.engine.prefix import PrefixCache
from outpace.loading import Loaded
from serving import STORY, model, run, serving

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# A template that iterates over the arguments of calls, as GLM's and Qwen3-Coder's do.
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>"
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}"
    "{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
PAINT: Any = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
LONG = {"type": "object", "properties": {"a": {"const": "red and green and blue"}}, "required": ["a"]}


def rich() -> Loaded:
    tokenizer = copy.deepcopy(model().tokenizer)
    tokenizer.chat_template = TEMPLATE
    return replace(model(), tokenizer=tokenizer)


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": arguments}}


def asked(path: str, arguments: Any) -> dict[str, Any]:
    """A conversation with a call, in an API's format."""
    if path == CHAT:
        turns = [*STORY, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}]
        return {
            "messages": [*turns, {"role": "tool", "tool_call_id": "c1", "content": "done"}],
            "max_tokens": 2,
        }
    if path == MESSAGES:
        use = {"type": "tool_use", "id": "c1", "name": "paint", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
        said = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        return {"messages": [*STORY, *said], "max_tokens": 2}
    item = {"type": "function_call", "call_id": "c1", "name": "paint", "arguments": arguments}
    return {
        "input": [*STORY, item, {"type": "function_call_output", "call_id": "c1", "output": "done"}],
        "max_output_tokens": 2,
    }


PLACE = {
    CHAT: "messages.1.tool_calls.0.function.arguments",
    MESSAGES: "messages.1.content.0.input",
    RESPONSES: "input.1.arguments",
}
REPAIRED = [
    ("", "{}"), (" \n", "{}"), ("null", "{}"), ('{"a": ', "{}"), ("{", "{}"),
    (None, "{}"), ({"a": 1}, '{"a":1}'),
    ('{"a": 1, "b', '{"a": 1}'), ('{"a": "re', '{"a": "re"}'), ('{"a": [1, {"b": ', '{"a": [1, {}]}'),
]  # fmt: skip
REFUSED = ["[1]", "5", '"red"', "red", "{'a': 1}", '{"a": NaN}', '{"a": 1} x', "[" * 9000, "[[],[" * 50_000]


@pytest.mark.parametrize("path", PLACE)
def test_arguments_that_are_no_object_are_repaired_or_refused_by_the_fields_name(path: str) -> None:
    count = "/count_tokens" if path == MESSAGES else ""

    async def main() -> None:
        async with serving(loaded=rich()) as client:

            async def seen(arguments: Any) -> Any:
                body = {
                    name: one
                    for name, one in asked(path, arguments).items()
                    if not (count and name == "max_tokens")
                }
                found = await client.send(path + count, body).json()
                return found.get("error") or found.get("usage", found)

            for wrong, right in REPAIRED:
                good = await seen(json.loads(right) if path == MESSAGES else right)
                assert "message" not in good and await seen(wrong) == good, wrong
            for wrong in REFUSED:
                exchange = client.send(path, asked(path, wrong))
                error = (await exchange.json())["error"]
                assert exchange.status == 400 and error["message"].startswith(f"{PLACE[path]}: "), wrong

    run(main)


def test_a_call_that_was_cut_off_can_be_sent_back() -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": LONG}}

    async def main() -> None:
        async with serving(loaded=rich()) as client:
            first = {"messages": STORY, "tools": [tool], "tool_choice": "required", "max_tokens": 24}
            (choice,) = (await client.send(CHAT, first).json())["choices"]
            (cut,) = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "length" and cut["function"]["arguments"][-1:] != "}"
            again = {"messages": [*STORY, choice["message"], *STORY], "tools": [tool], "max_tokens": 2}
            exchange = client.send(CHAT, again)
            assert "choices" in await exchange.json() and exchange.status == 200

    run(main)


# -- dumps -----------------------------------------------------------------------------------------------


def _chat_dumps(found: Any, **parsing: Any) -> list[dict[str, Any]]:
    """The message of an answer as openai-python dumps it, plain and parsed."""
    plain = ChatCompletion.model_validate(found)
    plain.choices[0].finish_reason = "stop"  # a text that is cut off is not parsed
    parsed = parse_chat_completion(
        chat_completion=plain,
        response_format=openai.NOT_GIVEN,
        input_tools=parsing.get("tools", openai.NOT_GIVEN),
    )
    messages = [one.choices[0].message for one in (plain, parsed)]
    return [message.model_dump(**how) for message in messages for how in ({}, {"mode": "json"})]


def test_openais_dumps_of_chats_can_be_sent_back() -> None:
    strict = {**PAINT, "function": {**PAINT["function"], "strict": True}}

    async def main() -> None:
        async with serving(loaded=rich()) as client:
            text = await client.chat(max_tokens=3).json()
            forced = await client.chat(tools=[PAINT], tool_choice="required", max_tokens=60).json()
            asked = {"response_format": {"type": "json_object"}, "max_tokens": 2}
            dumps = _chat_dumps(text) + _chat_dumps(forced, tools=[strict])
            dumps += _chat_dumps(await client.chat(**asked).json())
            thought = copy.deepcopy(text)
            thought["choices"][0]["message"] |= {"reasoning_content": "Hm.", "refusal": "No."}
            dumps += _chat_dumps(thought)
            dumps.append({**dumps[0], "parsed": {"a": 1}})
            dumps += [
                {**one, "provider_specific_fields": {"refusal": None}, "thinking_blocks": []} for one in dumps
            ]  # as LiteLLM adds them
            assert any(
                call["function"].get("parsed_arguments") for one in dumps for call in one["tool_calls"] or ()
            )
            for dump in dumps:
                exchange = client.chat(messages=[*STORY, dump, *STORY], max_tokens=1)
                assert "choices" in await exchange.json(), dump

    run(main)


def test_openais_dumps_of_responses_can_be_sent_back() -> None:
    tool = {"type": "function", "name": "paint", "parameters": SCHEMA}
    free = {"type": "custom", "name": "write"}

    async def main() -> None:
        async with serving(loaded=rich()) as client:
            items = list[dict[str, Any]]()
            for more in ({}, {"tools": [tool]}, {"tools": [free]}):
                choice = {"tool_choice": "required"} if more else {}
                asked = {"input": "Paint it.", "max_output_tokens": 60 if more else 3, **more, **choice}
                found = await client.send(RESPONSES, asked).json()
                dumps = Response.model_validate(found).model_dump()["output"]
                assert dumps, found
                items += dumps
                items += Response.model_validate(found).model_dump(by_alias=True, mode="json")["output"]
            kinds = {item["type"] for item in items}
            assert kinds == {"message", "function_call", "custom_tool_call"}
            said = [{"type": "reasoning_text", "text": "Hm."}]
            thought: dict[str, Any] = {"id": "rs_1", "type": "reasoning", "summary": [], "content": said}
            thought |= {"encrypted_content": None, "status": None}
            refused = {**items[0], "content": [{"type": "refusal", "refusal": "No."}]}
            parsed = [{**part, "parsed": {"a": 1}} for part in items[0]["content"]]
            more_items = [thought, refused, {**items[0], "content": parsed}]
            more_items += [
                {**item, "parsed_arguments": {"a": 1}} for item in items if item["type"] == "function_call"
            ]
            for item in items + more_items:
                user = {"role": "user", "content": "a"}
                exchange = client.send(RESPONSES, {"input": [user, item, user], "max_output_tokens": 1})
                assert (await exchange.json()).get("output"), item

    run(main)


# What anthropic 2.14 dumps: fields of its own, and None where there is nothing.
BLOCKS: list[dict[str, Any]] = [
    {"citations": None, "text": "a", "type": "text"},
    {"citations": None, "text": "a", "type": "text", "parsed_output": None},
    {"citations": None, "text": "a", "type": "text", "parsed_output": {"a": 1}},
    {"signature": "", "thinking": "a", "type": "thinking"},
    {"data": "x", "type": "redacted_thinking"},
    {
        "id": "c1",
        "caller": None,
        "input": {"a": None},
        "name": "paint",
        "type": "tool_use",
        "toolset_name": None,
    },
    {"id": "c1", "caller": {"type": "direct"}, "input": {}, "name": "paint", "type": "tool_use"},
]
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1", "content": None, "is_error": None}


def test_anthropics_dumps_can_be_sent_back() -> None:
    async def main() -> None:
        async with serving(loaded=rich()) as client:
            for block in BLOCKS:
                results = [{**RESULT, "cache_control": None}] if block["type"] == "tool_use" else []
                said = [
                    {"role": "assistant", "content": [block]},
                    {"role": "user", "content": results or "a"},
                ]
                exchange = client.send(MESSAGES, {"messages": [*STORY, *said], "max_tokens": 1})
                assert (await exchange.json()).get("content"), block

    run(main)


# -- a line of billing -----------------------------------------------------------------------------------

BILLED = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"
SYSTEM = "You are an agent. " * 80


@pytest.mark.parametrize("whole", [False, True])
def test_a_changing_line_of_billing_leaves_the_prefix_cache(whole: bool) -> None:
    def caching(engine: Engine) -> None:
        engine._batch.memory.prefixes = PrefixCache(2**24)

    def told(*texts: str) -> Any:
        return "\n".join(texts) if whole else [{"type": "text", "text": text} for text in texts]

    async def main() -> None:
        async with serving(change=caching) as client:
            found = list[tuple[int, int]]()
            for system in (told(SYSTEM), *(told(BILLED.format(key), SYSTEM) for key in ("eb6c6", "0aaa9"))):
                asked = {"messages": STORY, "max_tokens": 1, "system": system}
                usage = (await client.send(MESSAGES, asked).json())["usage"]
                found.append((usage["input_tokens"], usage["cache_read_input_tokens"]))
            (whole, none), *others = found
            assert not none and all(read >= 128 and read + new == whole for new, read in others)

    run(main)


@pytest.mark.parametrize(
    "text",
    [
        "What does x-anthropic-billing-header: a=b; mean?",
        "x-anthropic-billing-header: what does it do?",
        "x-anthropic-billing-header: a=b; is an example.\nExplain it.",
    ],
)
def test_a_text_about_billing_stays(text: str) -> None:
    async def main() -> None:
        async with serving() as client:
            asked = {"messages": STORY, "system": text}
            found = await client.send(f"{MESSAGES}/count_tokens", asked).json()
            whole = model().encode_chat([{"role": "system", "content": text}, *STORY])
            assert found == {"input_tokens": len(whole)}

    run(main)


# -- places of errors ------------------------------------------------------------------------------------


def _said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*STORY, {"role": role, "content": content}], "max_tokens": 2}


def _items(*items: Any, **more: Any) -> dict[str, Any]:
    return {"input": list(items), **more}


PLACES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, _said([{"type": "zip"}]), "messages.1.content.0.type"),
    (CHAT, _said([{"text": "a"}]), "messages.1.content.0.type"),
    (CHAT, _said([{"type": "text"}]), "messages.1.content.0.text"),
    (CHAT, _said([{"type": "text", "text": 5}]), "messages.1.content.0.text"),
    (CHAT, _said([{"type": "text", "text": "a", "annotations": "a"}]), "messages.1.content.0.annotations"),
    (CHAT, _said([{"type": "image_url", "image_url": {}}]), "messages.1.content.0.image_url.url"),
    (CHAT, _said(["a"]), "messages.1.content.0"),
    (CHAT, _said(5), "messages.1.content"),
    (CHAT, {"messages": [5]}, "messages.0"),
    (CHAT, _said("a") | {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    (CHAT, _said("a") | {"tool_choice": "any"}, "tool_choice"),
    (CHAT, _said("a") | {"speculation": 5}, "speculation"),
    (CHAT, _said("a") | {"speculation": {"drafter": 5}}, "speculation.drafter"),
    (CHAT, _said("a") | {"stop": ["a", 5]}, "stop.1"),
    (CHAT, _said("a") | {"logit_bias": {"5": "a"}}, "logit_bias.5"),
    ("/tokenize", _said([{"type": "zip"}]) | {"max_tokens": None}, "messages.1.content.0.type"),
    (MESSAGES, _said([{"type": "zip"}]), "messages.1.content.0.type"),
    (MESSAGES, _said([{"type": "thinking"}], "assistant"), "messages.1.content.0.thinking"),
    (
        MESSAGES,
        _said([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "zip"}]}]),
        "messages.1.content.0.content.0.type",
    ),
    (MESSAGES, _said([{"type": "image", "source": {"type": "x"}}]), "messages.1.content.0.source.type"),
    (MESSAGES, _said("a") | {"system": [{"type": "zip"}]}, "system.0.type"),
    (MESSAGES, _said("a") | {"system": 5}, "system"),
    (MESSAGES, _said("a") | {"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    (RESPONSES, _items({"type": "zip"}), "input.0.type"),
    (RESPONSES, _items({"role": "x", "content": "a"}), "input.0.role"),
    (RESPONSES, _items({"role": "user", "content": [{"type": "zip"}]}), "input.0.content.0.type"),
    (RESPONSES, _items({"type": "function_call"}), "input.0.call_id"),
    (RESPONSES, _items({"type": "reasoning", "content": [{"type": "x"}]}), "input.0.content.0.type"),
    (RESPONSES, _items(5), "input.0"),
    (RESPONSES, {"input": 5}, "input"),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "x"}}}, "text.format.type"),
    (RESPONSES, {"input": "a", "tools": [{"type": "function"}]}, "tools.0.name"),
    ("/v1/completions", {"prompt": ["a", 5]}, "prompt.1"),
    ("/v1/completions", {"prompt": [[1], ["a"]]}, "prompt.1.0"),
]


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("long", [False, True])
def test_errors_name_the_part_as_the_client_wrote_it(lenient: bool, long: bool) -> None:
    async def main() -> None:
        async with serving(lenient=lenient) as client:
            for path, body, place in PLACES:
                more = {"user": "a" * 2**17} if long and path != "/tokenize" else {}
                more = {"metadata": {"a": "b" * 2**17}} if path == MESSAGES and long else more
                exchange = client.send(path, {**body, **more})
                error = (await exchange.json())["error"]
                assert exchange.status == 400 and error["message"].startswith(f"{place}: "), (body, error)
                for name in ("str:", "list[", "union", "Wire", "tagged", "instance of"):
                    assert name not in error["message"]

    run(main)


def test_the_context_that_a_prompt_and_an_answer_need_is_told() -> None:
    async def main() -> None:
        async with serving() as client:
            context = client.service.defaults.context or 0
            asked = {"max_tokens": 5, "ignore_eos": True}
            found = await client.complete([5] * (context - 1), **asked).json()
            assert found["usage"]["completion_tokens"] == 1
            error = (await client.complete([5] * context, **asked).json())["error"]
            assert (
                f"but {context + 1} were requested: {context} of the prompt and at least 1"
                in error["message"]
            )

    run(main)
