"""Every field that is taken changes something, or is marked as without an effect; none is ignored in silence.

The list is that of the types: a new field without an entry here, and without the mark, fails.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import types
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tokenizers import Tokenizer

from image_models import picture, seeing, url_of
from outpace.loading import Loaded
from outpace.serve.body import IGNORED
from outpace.serve.known import refusal_of
from outpace.serve.routes import _APIS
from serving import STORY, model, run, serving

CHAT, TEXT, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
# Shows everything that templates may be given.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    "{{ enable_thinking | default('') }}{{ reasoning_effort | default('') }}{{ style | default('') }}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
Fragment = dict[str, Any]
PERSON = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
FUNCTION: Fragment = {"name": "weather", "parameters": PERSON}
CALL: Fragment = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
USE: Fragment = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"a": 1}}
OWN: Fragment = {"name": "weather", "input_schema": PERSON}
TOOL: Fragment = {"type": "function", "name": "weather", "parameters": PERSON}
CALLED: Fragment = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"a": 1}'}
USER: Fragment = {"role": "user", "content": "a"}
LAST: Fragment = {"type": "message", **USER}
BOTH: list[Fragment] = [
    {"type": "function", "function": {**FUNCTION, "name": name}} for name in ("weather", "other")
]
FIRST, SECOND = ({"type": "function", "function": {"name": name}} for name in ("weather", "other"))
TOKENS: Fragment = {"max_tokens": 2, "temperature": 0, "return_token_ids": True}
SHORT: Fragment = {"max_tokens": 2, "temperature": 0}
OUT: Fragment = {"max_output_tokens": 2, "temperature": 0}
LOGPROBS: Fragment = {"logprobs": True}
SOURCE: Fragment = {"type": "base64", "data": b64encode(picture(0)).decode()}
OTHER: Fragment = {"type": "base64", "data": b64encode(picture(1)).decode()}
INFILL: Fragment = {"input_prefix": "a", "input_suffix": "b", "n_predict": 2, "temperature": 0}
# Types of which one request has an image: a model that reads images answers it.
PICTURED = {"ImagePart", "ImageUrl", "InputImage", "ImageBlock", "ImageSource"}


def chat(**more: Any) -> Fragment:
    return {"messages": STORY, **TOKENS, **more}


def messages(**more: Any) -> Fragment:
    return {"messages": STORY, **SHORT, **more}


def responses(**more: Any) -> Fragment:
    return {"input": "a", **OUT, **more}


# Where an object of a type stands in a request: the path, the request, and an object to begin with.
PLACES: dict[str, tuple[str, Callable[[Fragment], Fragment], Fragment]] = {
    "Chat": (CHAT, lambda one: one, chat()),
    "Completions": (TEXT, lambda one: one, {"prompt": "The dog", **TOKENS}),
    "Messages": (MESSAGES, lambda one: one, messages()),
    "CountTokens": (f"{MESSAGES}/count_tokens", lambda one: one, {"messages": STORY}),
    "Responses": (RESPONSES, lambda one: one, responses()),
    "Tokenize": ("/tokenize", lambda one: one, {"prompt": "The dog"}),
    "Detokenize": ("/detokenize", lambda one: one, {"tokens": [5, 6]}),
    "Infill": ("/infill", lambda one: one, INFILL),
    "Extra": ("/infill", lambda one: {**INFILL, "input_extra": [one]}, {"text": "a"}),
    "Speculate": (CHAT, lambda one: chat(speculation=one), {"drafter": "off"}),
    "StreamOptions": (CHAT, lambda one: chat(stream=True, stream_options=one), {}),
    "Message": (CHAT, lambda one: chat(messages=[one, USER]), {"role": "assistant", "content": "a"}),
    "ToolCall": (CHAT, lambda one: chat(messages=[{"role": "assistant", "tool_calls": [one]}, USER]), CALL),
    "FunctionCall": (
        CHAT,
        lambda one: chat(messages=[{"role": "assistant", "tool_calls": [{"function": one}]}, USER]),
        CALL["function"],
    ),
    "Tool": (CHAT, lambda one: chat(tools=[one]), {"type": "function", "function": FUNCTION}),
    "Function": (CHAT, lambda one: chat(tools=[{"type": "function", "function": one}]), FUNCTION),
    "NamedTool": (
        CHAT,
        lambda one: chat(tools=[{"type": "function", "function": FUNCTION}], tool_choice=one),
        {"type": "function", "function": {"name": "weather"}},
    ),
    "Named": (
        CHAT,
        lambda one: chat(
            tools=[{"type": "function", "function": FUNCTION}],
            tool_choice={"type": "function", "function": one},
        ),
        {"name": "weather"},
    ),
    "Allowed": (
        CHAT,
        lambda one: chat(tools=BOTH, tool_choice=one),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FIRST]}},
    ),
    "AllowedTools": (
        CHAT,
        lambda one: chat(tools=BOTH, tool_choice={"type": "allowed_tools", "allowed_tools": one}),
        {"mode": "auto", "tools": [FIRST]},
    ),
    "Format": (CHAT, lambda one: chat(response_format=one), {"type": "json_object"}),
    "JsonSchema": (
        CHAT,
        lambda one: chat(response_format={"type": "json_schema", "json_schema": one}),
        {"name": "x", "schema": PERSON},
    ),
    "StructuredOutputsParams": (CHAT, lambda one: chat(structured_outputs=one), {"regex": "[0-9]{9}"}),
    "Prediction": (CHAT, lambda one: chat(prediction=one), {"type": "content", "content": "a"}),
    "TextPart": (
        CHAT,
        lambda one: chat(messages=[{"role": "user", "content": [one]}]),
        {"type": "text", "text": "a"},
    ),
    "RefusalPart": (
        CHAT,
        lambda one: chat(messages=[{"role": "assistant", "content": [one]}, USER]),
        {"type": "refusal", "refusal": "a"},
    ),
    "AnthropicTurn": (MESSAGES, lambda one: messages(messages=[one, *STORY]), USER),
    "ThinkingPart": (
        MESSAGES,
        lambda one: messages(messages=[USER, {"role": "assistant", "content": [one]}, USER]),
        {"type": "thinking", "thinking": "a"},
    ),
    "RedactedPart": (
        MESSAGES,
        lambda one: messages(messages=[USER, {"role": "assistant", "content": [one]}, USER]),
        {"type": "redacted_thinking", "data": "a"},
    ),
    "ToolUse": (
        MESSAGES,
        lambda one: messages(messages=[USER, {"role": "assistant", "content": [one]}, USER]),
        USE,
    ),
    "ToolResult": (
        MESSAGES,
        lambda one: messages(
            messages=[USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [one]}]
        ),
        {"type": "tool_result", "tool_use_id": "c1", "content": "a"},
    ),
    "ImagePart": (
        CHAT,
        lambda one: chat(messages=[{"role": "user", "content": [one]}]),
        {"type": "image_url", "image_url": {"url": url_of(picture(0))}},
    ),
    "ImageUrl": (
        CHAT,
        lambda one: chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": one}]}]),
        {"url": url_of(picture(0))},
    ),
    "InputImage": (
        RESPONSES,
        lambda one: responses(input=[{"role": "user", "content": [one]}]),
        {"type": "input_image", "image_url": url_of(picture(0))},
    ),
    "ImageBlock": (
        MESSAGES,
        lambda one: messages(messages=[{"role": "user", "content": [one]}]),
        {"type": "image", "source": SOURCE},
    ),
    "ImageSource": (
        MESSAGES,
        lambda one: messages(messages=[{"role": "user", "content": [{"type": "image", "source": one}]}]),
        SOURCE,
    ),
    "AnthropicTool": (MESSAGES, lambda one: messages(tools=[one]), OWN),
    "AnthropicHosted": (MESSAGES, lambda one: messages(tools=[one]), {"type": "bash_20250124"}),
    "AnthropicChoice": (MESSAGES, lambda one: messages(tools=[OWN], tool_choice=one), {"type": "auto"}),
    "Thinking": (MESSAGES, lambda one: messages(thinking=one), {"type": "enabled", "budget_tokens": 1024}),
    "OutputConfig": (MESSAGES, lambda one: messages(output_config=one), {}),
    "OutputFormat": (
        MESSAGES,
        lambda one: messages(output_config={"format": one}),
        {"type": "json_schema", "schema": PERSON},
    ),
    "ResponseMessage": (RESPONSES, lambda one: responses(input=[one, LAST]), LAST),
    "FunctionCallItem": (RESPONSES, lambda one: responses(input=[LAST, one, LAST]), CALLED),
    "CustomCallItem": (
        RESPONSES,
        lambda one: responses(input=[LAST, one, LAST]),
        {"type": "custom_tool_call", "call_id": "c1", "name": "p", "input": "a"},
    ),
    "OutputItem": (
        RESPONSES,
        lambda one: responses(input=[LAST, CALLED, one]),
        {"type": "function_call_output", "call_id": "c1", "output": "a"},
    ),
    "ReasoningText": (
        RESPONSES,
        lambda one: responses(input=[LAST, {"type": "reasoning", "content": [one]}, LAST]),
        {"type": "reasoning_text", "text": "a"},
    ),
    "ReasoningItem": (RESPONSES, lambda one: responses(input=[LAST, one, LAST]), {"type": "reasoning"}),
    "FunctionTool": (RESPONSES, lambda one: responses(tools=[one]), TOOL),
    "CustomTool": (RESPONSES, lambda one: responses(tools=[one]), {"type": "custom", "name": "p"}),
    "NamespaceTool": (
        RESPONSES,
        lambda one: responses(tools=[one]),
        {"type": "namespace", "name": "n", "tools": [TOOL]},
    ),
    "HostedTool": (RESPONSES, lambda one: responses(tools=[one]), {"type": "web_search"}),
    "FunctionChoice": (
        RESPONSES,
        lambda one: responses(tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=one),
        {"type": "function", "name": "weather"},
    ),
    "AllowedChoice": (
        RESPONSES,
        lambda one: responses(tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=one),
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    ),
    "ResponseText": (RESPONSES, lambda one: responses(text=one), {}),
    "ResponseFormat": (
        RESPONSES,
        lambda one: responses(text={"format": one}),
        {"type": "json_schema", "name": "x", "schema": PERSON},
    ),
    "Reasoning": (RESPONSES, lambda one: responses(reasoning=one), {}),
}
# A value of each field that changes something, and fields that it needs.
WITH: dict[str, Fragment] = {
    "Chat.stop": {"max_tokens": 8},
    "Chat.top_logprobs": LOGPROBS,
    "Chat.tool_choice": {"tools": [{"type": "function", "function": FUNCTION}]},
    "Chat.parallel_tool_calls": {"tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 2},
    "Chat.stream_options": {"stream": True},
    "Chat.trace": {"stream": True},
    "Chat.top_p": {"temperature": 2, "seed": 1, "max_tokens": 8},
    "Chat.top_k": {"temperature": 2, "seed": 1, "max_tokens": 8},
    "Chat.min_p": {"temperature": 2, "seed": 1, "max_tokens": 8},
    "Infill.seed": {"temperature": 2, "n_predict": 8},
    "Infill.top_p": {"temperature": 2, "seed": 1, "n_predict": 8},
    "Infill.top_k": {"temperature": 2, "seed": 1, "n_predict": 8},
    "Infill.min_p": {"temperature": 2, "seed": 1, "n_predict": 8},
    "Infill.temperature": {"seed": 1, "n_predict": 8},
    "Infill.stop": {"n_predict": 24},
    "Chat.seed": {"temperature": 2, "seed": 1, "max_tokens": 8},
    "Chat.max_completion_tokens": {"max_tokens": None},
    "Chat.repetition_penalty": {"max_tokens": 24},
    "Chat.presence_penalty": {"max_tokens": 24},
    "Chat.frequency_penalty": {"max_tokens": 24},
    "Chat.temperature": {"seed": 1, "max_tokens": 8},
    "Chat.continue_final_message": {"messages": [USER, {"role": "assistant", "content": "a"}]},
    "Tokenize.continue_final_message": {
        "messages": [USER, {"role": "assistant", "content": "a"}],
        "prompt": None,
    },
    "Chat.ignore_eos": {"logit_bias": {"0": 100}},
    "Chat.min_tokens": {"logit_bias": {"0": 100}},
    "CountTokens.tool_choice": {"tools": [OWN]},
    "Messages.tool_choice": {"tools": [OWN]},
    "Responses.tool_choice": {"tools": [TOOL]},
    "Message.tool_call_id": {"role": "tool"},
    "Message.refusal": {"content": None},
    "AnthropicChoice.name": {"type": "tool"},
    "StreamOptions.continuous_usage_stats": {"include_usage": True},
    "Tokenize.add_generation_prompt": {"messages": STORY, "prompt": None},
    "Tokenize.messages": {"prompt": None},
    "Format.json_schema": {"type": "json_schema"},
    "StructuredOutputsParams.json": {"regex": None},
    "StructuredOutputsParams.json_object": {"regex": None},
    "StructuredOutputsParams.choice": {"regex": None},
    "StructuredOutputsParams.grammar": {"regex": None},
}
VALUES: dict[str, Any] = {
    "model": "other name", "stream": True, "temperature": 1, "top_p": 0.1, "top_k": 1, "speculation": "off",
    "speculation_metrics": True, "n": 2, "max_tokens": 3, "max_completion_tokens": 4, "stop": [" ",
    "e", "a", "o", "."],
    "seed": 5, "logit_bias": {"300": 100}, "presence_penalty": 2, "frequency_penalty": 2,
    "stream_options": {"include_usage": True}, "min_p": 0.9, "repetition_penalty": 1.9, "ignore_eos": True,
    "min_tokens": 2, "stop_token_ids": [5000], "return_token_ids": None, "cache_salt": "", "trace": True,
    "messages": [{"role": "user", "content": "Another."}], "logprobs": True, "top_logprobs": 2,
    "response_format": {"type": "json_object"}, "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required", "prediction": {"type": "content", "content": "a b c"},
    "structured_outputs": {"regex": "[0-9]{9}"}, "regex": "[a-c]{9}", "choice": ["xyz"],
    "grammar": "root ::= [0-9]",
    "guided_json": PERSON, "guided_regex": "[0-9]{9}", "guided_choice": ["xyz"],
    "guided_grammar": "start: /[0-9]/",
    "Chat.json_schema": PERSON, "Completions.json_schema": PERSON, "json": PERSON, "json_object": True,
    "input_prefix": "c", "input_suffix": "c", "input_extra": [{"text": "c"}],
    "Infill.prompt": "c and more", "n_predict": 3,
    "Extra.text": "c and more", "filename": "another.py",
    "chat_template_kwargs": {"style": "new"}, "reasoning_effort": "high", "prompt": "A cat sat",
    "Completions.logprobs": 1, "echo": True, "best_of": 2, "suffix": "x", "Messages.tools": [OWN],
    "CountTokens.tools": [OWN], "system": "Be brief.", "stop_sequences": [" ", "e", "a", "o", "t"],
    "thinking": {"type": "enabled"}, "output_config": {"effort": "high"},
    "Messages.tool_choice": {"type": "none"},
    "CountTokens.tool_choice": {"type": "none"}, "input": "Another text than before.",
    "instructions": "Be brief.",
    "max_output_tokens": 3, "text": {"format": {"type": "json_object"}}, "Responses.tools": [TOOL],
    "parallel_tool_calls": False, "Responses.reasoning": {"effort": "high"}, "previous_response_id": "x",
    "conversation": "x", "background": True, "add_special_tokens": False, "add_generation_prompt": False,
    "continue_final_message": True, "prefix": True, "partial": True, "return_token_strs": True,
    "tokens": [7], "Speculate.drafter": "lookahead", "num_speculative_tokens": 3,
    "memory": "on", "Function.strict": True, "include_usage": True, "continuous_usage_stats": True,
    "include_obfuscation": True,
    "role": "system", "content": "b and more", "name": "another one", "tool_calls": [CALL],
    "tool_call_id": "another one",
    "refusal": "no and no", "reasoning_content": "hm", "Message.reasoning": "hm",
    "ToolCall.id": "another one",
    "ToolCall.function": FUNCTION,
    "arguments": '{"b": "much more"}', "Tool.function": {"name": "other"}, "description": "more",
    "parameters": {},
    "NamedTool.function": {"name": "x"}, "Format.type": "text", "json_schema": {"name": "a", "schema": {}},
    "schema": {"const": 5}, "Prediction.content": "b", "TextPart.text": "b and more",
    "ReasoningText.text": "b and more",
    "AnthropicTurn.role": "assistant", "thinking_": "b", "ToolUse.id": "another one",
    "ToolUse.input": {"b": "much more"},
    "tool_use_id": "another one", "is_error": True, "input_schema": {"type": "object"},
    "AnthropicHosted.type": "web",
    "AnthropicChoice.type": "none", "AnthropicChoice.name": "weather", "disable_parallel_tool_use": True,
    "Thinking.type": "adaptive", "ThinkingPart.thinking": "b and more", "effort": "low",
    "OutputConfig.format": {"type": "json_schema", "schema": PERSON}, "call_id": "another one",
    "namespace": "another",
    "CustomCallItem.input": "b and more", "output": "b and more",
    "ReasoningItem.content": [{"type": "text", "text": "b"}],
    "CustomTool.format": {"type": "grammar"}, "NamespaceTool.tools": [], "HostedTool.type": "other",
    "ResponseText.format": {"type": "json_object"}, "ResponseFormat.type": "text",
    "ImagePart.image_url": {"url": url_of(picture(1))}, "ImageUrl.url": url_of(picture(1)),
    "InputImage.image_url": url_of(picture(1)), "file_id": "a", "source": OTHER, "data": OTHER["data"],
    "ImageSource.type": "url", "ImageSource.url": "http://localhost/a.png",
    "Allowed.allowed_tools": {"mode": "required", "tools": [FIRST]}, "mode": "required",
    "AllowedTools.tools": [SECOND], "AllowedChoice.tools": [{"type": "function", "name": "other"}],
    "FunctionChoice.name": "other", "FunctionChoice.type": "custom",
    "OutputItem.type": "custom_tool_call_output", "ReasoningText.type": "text", "TextPart.type": "input_text",
}  # fmt: skip
# What a pair of requests cannot show, and where it is shown.
ELSEWHERE = {
    "OutputItem.type", "ReasoningText.type", "TextPart.type", "FunctionChoice.type",  # names of one thing
    "Chat.parallel_tool_calls", "Responses.parallel_tool_calls",  # test_calls: an answer of several calls
    "AnthropicChoice.disable_parallel_tool_use",
    "Tokenize.add_special_tokens",  # the embedded tokenizer adds none
    "Speculate.memory",  # test_errors: it is of other requests
    "Speculate.num_speculative_tokens", "Prediction.content",  # test_chat, test_trace: they are of counts
    "Messages.temperature", "Messages.top_p", "Messages.top_k", "Responses.top_k",  # as Chat's, but no seed
    "Messages.stream", "Responses.stream", "Chat.stream", "Completions.stream", "Infill.stream",
    "Chat.thinking_token_budget", "Chat.thinking_budget_tokens", "Chat.thinking_budget",  # test_marks:
    "Thinking.budget_tokens", "Reasoning.max_tokens",  # they need a template that marks reasoning
    # Those are in every test of streams, and test_errors has another model, which is refused
    "CountTokens.model", "Tokenize.model", "Detokenize.model", "Infill.model",
}  # fmt: skip
REPEATED = ("metadata", "truncation", "tools", "text")
NAMES: dict[str, Any] = {"id": "x", "status": "completed", "phase": "x", "signature": "x", "data": "b"}


def classes(kind: Any, seen: dict[str, type[BaseModel]]) -> None:
    """Collect the types of objects that a type contains."""
    origin = get_origin(kind)
    if origin in (Annotated, list, dict, Union, types.UnionType):
        for one in get_args(kind):
            classes(one, seen)
    elif isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__ not in seen:
        seen[kind.__name__] = kind
        for field in kind.model_fields.values():
            classes(field.annotation, seen)


def fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """Each field: the name of its type, its own as clients write it, and what pydantic knows of it."""
    seen: dict[str, type[BaseModel]] = {}
    for _, body in _APIS.values():
        classes(body, seen)
    for name, kind in seen.items():
        for own, field in kind.model_fields.items():
            yield name, field.alias or own, field


def inert(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and extra.get("x-effect") == "none"


def constant(field: FieldInfo) -> bool:
    """True for the one value of a field that says of which type its object is."""
    given = field.annotation
    kinds = [one for one in get_args(given) if one is not type(None)]
    if get_origin(given) in (Union, types.UnionType) and len(kinds) == 1:
        given = kinds[0]
    return get_origin(given) is Literal and len(get_args(given)) == 1


def sample(field: FieldInfo, name: str) -> Any:
    """A value of a field without an effect."""
    kinds = [field.annotation]
    while kinds:
        one = kinds.pop(0)
        if one is Any:
            return {"a": "b"}
        if get_origin(one) in (Union, types.UnionType, Annotated):
            kinds += [part for part in get_args(one) if part is not type(None)]
        elif get_origin(one) is Literal:
            return get_args(one)[-1]
        elif one is bool:
            return name != "store"
        elif one in (str, int):
            return NAMES.get(name, "x") if one is str else 2000
        elif get_origin(one) is dict or one is dict:
            return {"a": "b"}
        elif get_origin(one) is list:
            return [] if name != "modalities" else ["text"]
    return None


INERT = [(kind, name) for kind, name, field in fields() if inert(field)]
ACTIVE = [
    (kind, name)
    for kind, name, field in fields()
    if not inert(field) and not constant(field) and f"{kind}.{name}" not in ELSEWHERE
]


def rich() -> Loaded:
    """The model with a template that shows everything, and with marks for filling in the middle."""
    state = json.loads(model().tokenizer.backend_tokenizer.to_str())
    marks = ("fim_prefix", "fim_suffix", "fim_middle", "file_sep")
    for place, mark in enumerate(marks):  # in place of the last tokens
        token = 4095 - place
        named = {spelt: own for spelt, own in state["model"]["vocab"].items() if own != token}
        state["model"]["vocab"] = named
        added = {**state["added_tokens"][0], "id": token, "content": f"<|{mark}|>"}
        state["added_tokens"].append(added)
    state["model"]["merges"] = [
        pair for pair in state["model"]["merges"] if "".join(pair) in state["model"]["vocab"]
    ]
    tokenizer = copy.deepcopy(model().tokenizer)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.chat_template = TEMPLATE
    return replace(model(), tokenizer=tokenizer)


def normal(text: str, headers: dict[str, str]) -> str:
    """A response without what differs from one to the next."""
    text = re.sub(r"(chatcmpl-|cmpl-|msg_|resp_|call_|toolu_|rs_|fc_)[0-9a-f]+", r"\1", text)
    text = re.sub(r'"(created|created_at|cached_tokens|cache_read_input_tokens)":\d+', r'"\1":0', text)
    text = re.sub(r'"step":\d+', "", text)
    if text.startswith('{"id":"resp_'):  # which repeats what was asked for
        told = json.loads(text)
        text = json.dumps({name: one for name, one in told.items() if name not in REPEATED})
    return text + str({name: value for name, value in headers.items() if name.startswith("x-outpace")})


def built(kind: str, more: Fragment) -> tuple[str, Fragment]:
    path, place, begun = PLACES[kind]
    return path, place({**begun, **more})


def test_each_type_has_a_place() -> None:
    assert {kind for kind, _, _ in fields()} == set(PLACES)
    there = {f"{kind}.{name}" for kind, name, field in fields() if not inert(field)}
    assert there >= ELSEWHERE and there >= {key for key in VALUES if "." in key}


class Answers:
    """Statuses and normal texts of requests; one that is asked for again is not sent again."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._known: dict[str, tuple[int, str]] = {}

    async def to(self, path: str, body: Fragment) -> tuple[int, str]:
        asked = path + json.dumps(body)
        if asked not in self._known:
            exchange = self._client.send(path, body)
            text = await exchange.text()
            self._known[asked] = exchange.status, normal(text, exchange.headers)
        return self._known[asked]


async def wrong_of(check: Callable[[str, str], Awaitable[bool]], of: list[tuple[str, str]]) -> list[str]:
    """The fields that a check finds wrong; some are checked at once, since a batch takes less time."""
    places = asyncio.Semaphore(12)

    async def checked(kind: str, name: str) -> bool:
        async with places:
            return await check(kind, name)

    found = await asyncio.gather(*(checked(*one) for one in of))
    return [f"{kind}.{name}" for (kind, name), good in zip(of, found, strict=True) if not good]


def test_fields_without_an_effect_have_none() -> None:
    known = {(kind, name): field for kind, name, field in fields()}

    async def main() -> None:
        async with serving(loaded=rich()) as text, serving(loaded=seeing()) as images:
            answers = {text: Answers(text), images: Answers(images)}

            async def same(kind: str, name: str) -> bool:
                own = answers[images if kind in PICTURED else text]
                value = sample(known[kind, name], name)
                other = {"store": None, "data": "c"}.get(name)
                path, body = built(kind, {name: value})
                _, without = built(kind, {} if other is None else {name: other})
                (status, one), (_, two) = await own.to(path, body), await own.to(path, without)
                return status == 200 and one == two

            assert not await wrong_of(same, INERT)

    run(main, 600)


def test_all_other_fields_change_something() -> None:
    async def main() -> None:
        async with (
            serving("prompt_lookup", loaded=rich(), others={"lookahead": "lookahead"}) as text,
            serving(loaded=seeing()) as images,
        ):
            answers = {text: Answers(text), images: Answers(images)}

            async def differs(kind: str, name: str) -> bool:
                own = answers[images if kind in PICTURED else text]
                key = f"{kind}.{name}"
                common = key.replace("Completions.", "Chat.")
                base = dict(WITH.get(common, {}))
                value = VALUES[key] if key in VALUES else VALUES[name]
                path, before = built(kind, base)
                _, after = built(kind, {**base, name: value})
                (_, one), (_, two) = await own.to(path, before), await own.to(path, after)
                return one != two

            assert not await wrong_of(differs, ACTIVE)

    run(main, 600)


@pytest.mark.parametrize("kind", PLACES)
def test_a_field_of_null_is_absent(kind: str) -> None:
    known = [(name, field) for own, name, field in fields() if own == kind]
    path, plain = built(kind, {})
    body = _APIS[path][1]
    for name, field in known:
        if name in PLACES[kind][2] or field.is_required():
            continue
        _, asked = built(kind, {name: None, "qz_of_a_client": None})
        assert body.model_validate(asked) == body.model_validate(plain), name


def test_a_field_of_one_path_is_known_at_the_others() -> None:
    names = {name for path, (_, body) in _APIS.items() if path[:3] == "/v1" for name in body.model_fields}
    everywhere = {"model", "stream", "temperature", "top_k", "top_p", "metadata", "service_tier"}
    assert not [name for name in names - everywhere if refusal_of(name).startswith("unrecognized")]


@pytest.mark.parametrize("long", [False, True])
def test_unknown_fields_are_refused_or_ignored_with_a_header(long: bool) -> None:
    extra: Fragment = {"qz\u00e9\r\n": 1, "top_a": 2}
    turn = {"role": "user", "content": [{"type": "text", "text": "a", "shape": 1}], "mood": "good"}
    more = {"metadata": {"a": "b" * (2**17 if long else 1)}}

    async def main() -> None:
        async with serving() as client:
            exchange = client.chat(max_tokens=1, top_a=2, **more)
            error = (await exchange.json())["error"]
            assert error["message"] == "unrecognized request argument: top_a" and exchange.status == 400
            for field, owner in (
                ("n_predict", "llama-server's"),
                ("bad_words", "vLLM's"),
                ("functions", "OpenAI's"),
            ):
                error = (await client.chat(**{field: 4}, **more).json())["error"]
                assert (
                    error["message"]
                    == f"{field}: this field of {owner} has no effect at this path; leave it out"
                )
        async with serving(lenient=True) as client:
            plain = await client.chat(
                messages=[{"role": "user", "content": "a"}], max_tokens=2, **more
            ).json()
            exchange = client.chat(messages=[turn], max_tokens=2, **extra, **more)
            assert (await exchange.json())["choices"] == plain["choices"]
            named = set(exchange.headers[IGNORED].split(", "))
            assert named == {"qz???", "top_a", "messages.0.content.0.shape", "messages.0.mood"}
            exchange = client.chat(max_tokens=2, **more)
            assert "choices" in await exchange.json() and IGNORED not in exchange.headers
            exchange = client.chat(max_tokens="2", top_a=1, **more)
            assert (await exchange.json())["error"]["param"] == "max_tokens" and exchange.status == 400

    run(main)
