"""Calls as models write them, requests that offer a tool, and what is read from the answers."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

from outpace.core import StreamedToken
from outpace.loading import Loaded
from outpace.serve.answers import Answer, Said
from outpace.serve.calls import Bare, CallFormat, DeepSeek, Listed, NamedCalls, Tagged
from outpace.serve.dialogue import format_of
from outpace.serve.json_calls import Signature
from outpace.serve.marked import Coder, Dsml, Gemma, Glm
from outpace.serve.messages_body import Messages, conversation, toolbox
from serving import STORY, Client, model

PATHS = CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"day": {"enum": ["today", "tomorrow"]}, "count": {"type": "integer", "maximum": 9}},
    "required": ["day"],
}
FUNCTION = {"name": "weather", "description": "of a day", "parameters": SCHEMA}
HERMES = (
    "{% if tools %}TOOLS {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}"
    "{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "kind": {"enum": ["file", "folder"]},
        "lines": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["path"],
}
READ = Signature("read", PARAMETERS)
FUNCTIONS = {one.name: one for one in (READ, Signature("now", {"type": "object", "properties": {}}))}
ARGUMENTS = {"path": 'a "b" <c>', "count": 3, "kind": "file", "lines": ["x", "y"]}
JSON = json.dumps(ARGUMENTS)
G4 = Gemma("<|tool_call>", "<tool_call|>", '<|"|>')
# A call of each format as its family's template writes it, and a word that such a template has.
WRITTEN: list[tuple[CallFormat, str, str]] = [
    (Tagged(), f'<tool_call>\n{{"name": "read", "arguments": {JSON}}}\n</tool_call>', "<tool_call>"),
    (Bare(), f'{{"name": "read", "parameters": {JSON}}}', "Environment: ipython"),
    (Bare("arguments"), f'{{"name": "read", "arguments": {JSON}}}', "{{ tools }}"),
    (Listed(), f'[TOOL_CALLS][{{"name": "read", "arguments": {JSON}}}]', "[TOOL_CALLS]"),
    (NamedCalls(), f"[TOOL_CALLS]read[ARGS]{JSON}", "[TOOL_CALLS] [ARGS]"),
    (
        DeepSeek(),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>{JSON}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
    (
        format_of("<｜tool▁calls▁begin｜> ```json"),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n{JSON}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜> ```json",
    ),
    (
        Glm(),
        '<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a "b" <c></arg_value>\n'
        "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n<arg_key>kind</arg_key>\n<arg_value>file</arg_value>\n"
        '<arg_key>lines</arg_key>\n<arg_value>["x","y"]</arg_value>\n</tool_call>',
        "<tool_call> <arg_key>",
    ),
    (
        Coder(),
        '<tool_call>\n<function=read>\n<parameter=path>\na "b" <c>\n</parameter>\n'
        "<parameter=count>\n3\n</parameter>\n<parameter=kind>\nfile\n</parameter>\n"
        '<parameter=lines>\n["x","y"]\n</parameter>\n</function>\n</tool_call>',
        "<tool_call> <function=",
    ),
    (
        Dsml(),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="read">\n'
        '<｜DSML｜parameter name="path" string="true">a "b" <c></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="kind" string="true">file</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="lines" string="false">["x","y"]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "｜DSML｜",
    ),
    (
        Gemma(),
        '<start_function_call>call:read{path:<escape>a "b" <c><escape>,count:3,kind:<escape>file<escape>,'
        "lines:[<escape>x<escape>,<escape>y<escape>]}<end_function_call>",
        "<start_function_call>",
    ),
    (
        G4,
        '<|tool_call>call:read{path:<|"|>a "b" <c><|"|>,count:3,kind:<|"|>file<|"|>,'
        'lines:[<|"|>x<|"|>,<|"|>y<|"|>]}<tool_call|>',
        "<|tool_call>",
    ),
]
IDS = [f"{type(form).__name__}{place}" for place, (form, _, _) in enumerate(WRITTEN)]


def nothing(tokens: list[int]) -> str:
    raise AssertionError("no tokenizer is needed")


def pieces(answer: Answer, text: str, size: int, complete: bool = True) -> list[Said]:
    said = []
    for start in range(0, len(text), size):
        said += answer.push([StreamedToken(5, 1, text[start : start + size])])
    return said + answer.end(complete)


def read(said: list[Said]) -> tuple[str, list[tuple[str | None, Any]]]:
    """The text of an answer, and its calls."""
    calls: dict[int, list[Any]] = {}
    for one in said:
        if one.kind == "call":
            assert (one.name is not None) == (one.call not in calls)
            calls.setdefault(one.call, [one.name, ""])[1] += one.text
    text = "".join(one.text for one in said if one.kind == "text")
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()]


CALLED = f"<|channel|>commentary to=functions.read <|constrain|>json<|message|>{JSON}"


def body(path: str, choice: str = "auto", **more: Any) -> dict[str, Any]:
    """A request with one tool in an API's format; ``choice`` is "auto", "none", "required" or "named"."""
    if path == CHAT:
        named: Any = {"type": "function", "function": {"name": "weather"}}
        tools: Any = [{"type": "function", "function": FUNCTION}]
        own: dict[str, Any] = {"messages": STORY, "max_tokens": 80}
    elif path == MESSAGES:
        named = {"type": "tool", "name": "weather"}
        tools = [{"name": "weather", "description": "of a day", "input_schema": SCHEMA}]
        own = {"messages": STORY, "max_tokens": 80}
    else:
        named = {"type": "function", "name": "weather"}
        tools = [{"type": "function", **FUNCTION}]
        own = {"input": STORY, "max_output_tokens": 80}
    choices: dict[str, Any] = {"named": named, "auto": "auto", "none": "none", "required": "required"}
    if path == MESSAGES:
        choices |= {kind: {"type": kind} for kind in ("auto", "none")} | {"required": {"type": "any"}}
    return {**own, "temperature": 0, "tools": tools, "tool_choice": choices[choice], **more}


async def streamed(client: Client, path: str, asked: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of a stream, with its rules checked."""
    events = await client.send(path, {**asked, "stream": True}).events()
    text, calls = "", dict[Any, list[str]]()
    if path == CHAT:
        for choice in (event["choices"][0] for event in events[:-1]):
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls[call["index"]] = [call["function"]["name"], ""]
                calls[call["index"]][1] += call["function"]["arguments"]
        assert (events[-2]["choices"][0]["finish_reason"] == "tool_calls") == bool(calls)
    elif path == MESSAGES:
        opened: int | None = None
        for event in events:
            if event["type"] == "content_block_start":
                assert opened is None
                opened, block = event["index"], event["content_block"]
                if block["type"] == "tool_use":
                    assert block["input"] == {} and block["id"].startswith("toolu_")
                    calls[opened] = [block["name"], ""]
            elif event["type"] == "content_block_delta":
                assert event["index"] == opened
                text += event["delta"].get("text", "")
                if event["delta"]["type"] == "input_json_delta":
                    calls[opened][1] += event["delta"]["partial_json"]
            elif event["type"] == "content_block_stop":
                assert event["index"] == opened
                opened = None
        assert opened is None and events[-1]["type"] == "message_stop"
        assert (events[-2]["delta"]["stop_reason"] == "tool_use") == bool(calls)
    else:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        items: dict[int, Any] = {}
        for event in events:
            if event["type"] == "response.output_item.added":
                assert len(items) == event["output_index"]
                items[event["output_index"]] = event["item"]
                if event["item"]["type"] == "function_call":
                    assert event["item"]["arguments"] == ""
                    calls[event["item"]["id"]] = [event["item"]["name"], ""]
            elif event["type"] == "response.function_call_arguments.delta":
                calls[event["item_id"]][1] += event["delta"]
            elif event["type"] == "response.function_call_arguments.done":
                assert calls[event["item_id"]][1] == event["arguments"]
            elif event["type"] == "response.output_text.delta":
                text += event["delta"]
            elif event["type"] == "response.output_item.done":
                items[event["output_index"]] = event["item"]
        assert events[-1]["response"]["output"] == list(items.values())
        assert not calls or events[-1]["response"]["status"] == "completed"
    return text, [(name, arguments) for name, arguments in calls.values()]


def answered(path: str, found: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of a complete response."""
    if path == CHAT:
        message = found["choices"][0]["message"]
        calls = [one["function"] for one in message.get("tool_calls", ())]
        return message["content"] or "", [(one["name"], one["arguments"]) for one in calls]
    if path == MESSAGES:
        blocks = found["content"]
        text = "".join(one["text"] for one in blocks if one["type"] == "text")
        return text, [(b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
    items = found["output"]
    text = "".join(one["content"][0]["text"] for one in items if one["type"] == "message")
    return text, [(one["name"], one["arguments"]) for one in items if one["type"] == "function_call"]


ALTERNATING = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] or (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}{{ m.role }}: "
    "{{ m.content }}\n{% endfor %}"
)


def with_template(template: str | None) -> Loaded:
    """The embedded model with another chat template."""
    tokenizer = copy.deepcopy(model().tokenizer)
    tokenizer.chat_template = template
    return replace(model(), tokenizer=tokenizer)


def counted(path: str, found: dict[str, Any]) -> int:
    """The number of tokens of the prompt, by the response's usage."""
    usage = found["usage"]
    if path == MESSAGES:
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    return int(usage.get("prompt_tokens", usage.get("input_tokens")))


def prompt_of(client: Client, asked: dict[str, Any]) -> list[int]:
    parsed = Messages.model_validate(asked)
    turns, options = conversation(client.service, parsed, toolbox(parsed))
    return client.service.model.encode_chat(turns, **options)
