"""``POST /v1/chat/completions``: its body, parsed to a request, and its response, whole and in chunks."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints
from starlette.responses import Response

from outpace.core import Generation, TokenLogprobs
from outpace.serve.errors import Refused
from outpace.serve.fields import (
    PARTS,
    TURNS,
    Anything,
    Int,
    Most,
    Object,
    OpenAI,
    Parts,
    TextOnly,
    TextParts,
    Wire,
    plain_text,
)
from outpace.serve.formats import FINISH, Writer, entries_of, new_id
from outpace.serve.request import ParsedRequest, check_stream, openai_params, salted
from outpace.serve.run import Event, Run
from outpace.serve.service import Service

_log = logging.getLogger("outpace.serve")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,256}")


# -- the body ---------------------------------------------------------------------------------------------


class FunctionCall(Wire):
    name: str
    arguments: str


class ToolCall(Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | Parts | None, TextOnly] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=PARTS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Anything | None = None
    audio: None = None
    function_call: None = None


Conversation = Annotated[list[Message], Field(min_length=1, max_length=TURNS, fail_fast=True)]


class Function(Wire):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class Named(Wire):
    name: str


class NamedTool(Wire):
    type: Literal["function"]
    function: Named


class JsonSchema(Wire):
    name: str
    description: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None


class Format(Wire):
    """A ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Wire):
    type: Literal["content"]
    content: str | TextParts


class Chat(OpenAI):
    """``POST /v1/chat/completions``."""

    messages: Conversation
    max_tokens: Most | None = None
    max_completion_tokens: Most | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: Object | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=8, fail_fast=True)] | None = None
    verbosity: Literal["medium"] | None = None


async def chat(service: Service, body: Chat, salt: str | None) -> Response:
    """Handle a chat request."""
    run = await service.start(body.n or 1, lambda: _parse(service, body, salt))
    return await _Writer(service, body, run).response()


# -- parsing -----------------------------------------------------------------------------------------


async def _parse(service: Service, body: Chat, salt: str | None) -> ParsedRequest:
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise Refused(400, "give max_completion_tokens or max_tokens, not both", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused(400, "top_logprobs needs logprobs: true", "top_logprobs")
    check_stream(body)
    schema = schema_of(body)
    if schema is not None and body.min_tokens:
        raise Refused(400, "min_tokens cannot be combined with a schema; leave it out", "min_tokens")
    turns, options = await asyncio.to_thread(_turns, service, body)
    prompt = await service.prompts.conversation(turns, **options)
    most = service.defaults.most_tokens([prompt], body.max_completion_tokens or body.max_tokens)
    prediction = None
    if body.prediction is not None:
        prediction = await service.prompts.tokens(plain_text(body.prediction.content), special=False)
    return ParsedRequest(
        [prompt],
        openai_params(body, service.defaults, most, (body.top_logprobs or 0) if body.logprobs else None),
        body.n or 1,
        schema,
        prediction,
        salted(salt, body),
        body.trace,
    )


def _turns(service: Service, body: Chat) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversation in the format of chat templates, and their options."""
    options = _template_options(service, body)
    if body.tools and body.tool_choice != "none":
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return [template_message(message) for message in body.messages], options


def _template_options(service: Service, body: Chat) -> dict[str, Any]:
    """The variables that a client gives the model's template: those that it reads, and no option of ours.

    Raises:
        Refused: there is another one.
    """
    options = body.chat_template_kwargs or {}
    known = service.model.template_options if options else frozenset()
    for name in options:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise Refused(
                400,
                f"chat_template_kwargs: this model's template has no variable {name!r} for requests; it has "
                f"{there}",
                "chat_template_kwargs",
            )
    return dict(options)


def template_message(message: Message) -> dict[str, Any]:
    """Convert a message to the format of chat templates, but for the arguments of its calls (``texts``)."""
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": plain_text(message.refusal if message.content is None else message.content),
    }
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return turn


def _called(body: Chat) -> list[Function]:
    """The functions of which the answer must call one.

    Raises:
        Refused: it is not among the tools, there are none, or its name is none.
    """
    choice, tools = body.tool_choice, [tool.function for tool in body.tools or ()]
    if choice == "auto" and not tools:
        raise Refused(400, "tool_choice needs tools; leave it out", "tool_choice")
    if choice in (None, "none", "auto"):
        return []
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
    if not tools:
        raise Refused(400, "tool_choice names a tool that is not among tools", "tool_choice")
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            raise Refused(400, "a tool's name has letters, digits, _, . and - only", "tools")
    return tools


def schema_of(body: Chat) -> dict[str, Any] | None:
    """The schema of the answer: that of its format, or of a required call.

    Raises:
        Refused: there are two of them, or one is missing.
    """
    called, form = _called(body), body.response_format
    if form is None or form.type == "text":
        return tool_schema(called) if called else None
    if called:
        raise Refused(400, "response_format and a required tool exclude each other", "response_format")
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise Refused(400, "response_format needs json_schema: {name, schema}", "response_format")
    return form.json_schema.schema_ if form.json_schema.schema_ is not None else {}


def tool_schema(functions: Seq[Function]) -> dict[str, Any]:
    """The schema of a call of one of these functions: its name, then its arguments.

    Raises:
        Refused: two functions define different things by one name, or define nothing.
    """
    calls, shared = [], dict[str, dict[str, Any]]()
    for function in functions:
        arguments = dict(function.parameters or {"type": "object", "properties": {}})
        for key in ("$defs", "definitions"):  # references begin at the root
            definitions = arguments.pop(key, {})
            if not isinstance(definitions, dict):
                raise Refused(400, f"{key} in the parameters of {function.name!r} must be an object", "tools")
            for name, definition in definitions.items():
                if shared.setdefault(key, {}).setdefault(name, definition) != definition:
                    raise Refused(400, f"two tools define {name!r} in different ways; rename one", "tools")
        call = {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        calls.append(call)
    return {"anyOf": calls, **shared}


# -- formatting ------------------------------------------------------------------------------------------


class _Call:
    """Incremental parser of a forced call, ``{"name":"...","arguments":...}``."""

    def __init__(self, names: Seq[str]) -> None:
        self._heads = {f'{{"name":{json.dumps(name)},"arguments":': name for name in names}
        self.id = new_id("call_")
        self.name: str | None = None
        self._text = ""

    def push(self, text: str) -> str:
        """Add new text; return the new part of the arguments."""
        self._text += text
        if self.name is None:
            head = next((head for head in self._heads if self._text.startswith(head)), None)
            if head is None:
                return ""
            self.name, self._text = self._heads[head], self._text[len(head) :]
        piece, self._text = self._text[:-1], self._text[-1:]  # the last character may close the call
        return piece

    def end(self, complete: bool) -> str:
        """The rest of the arguments."""
        return "" if complete or self.name is None else self._text


class _Writer(Writer):
    """Writer of the events of one run in the format of OpenAI's chat."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: Chat, run: Run) -> None:
        super().__init__(service, body, run)
        self._service, self._body = service, body
        self._names = [function.name for function in _called(body)]
        self._calls = {index: _Call(self._names) for index in range(run.request.n)} if self._names else {}
        self._parses = bool(
            body.tools
            and not self._names
            and body.tool_choice != "none"
            and getattr(service.model.tokenizer, "response_template", None)
        )

    def _prompt_ids(self) -> dict[str, Any]:
        """The prompt's token ids, if requested."""
        return {"prompt_token_ids": self._run.request.prompts[0]} if self._body.return_token_ids else {}

    # -- in one piece --

    def _whole(self) -> dict[str, Any]:
        choices = (self._choice(index, end) for index, end in enumerate(self._run.generations))
        return {"choices": choices, "service_tier": None} | self._prompt_ids()

    def _choice(self, index: int, end: Generation) -> dict[str, Any]:
        reason = FINISH[end.finish_reason]
        message: dict[str, Any] = {"role": "assistant", "content": end.text, "refusal": None}
        if self._names:
            call = _Call(self._names)
            arguments = call.push(end.text or "") + call.end(reason == "stop")
            if call.name is not None:
                message["content"] = None
                message["tool_calls"] = [_tool_call(call.id, call.name, arguments)]
                reason = "tool_calls" if reason == "stop" else reason
        elif self._parses:
            parsed = self._parsed(end)
            message |= parsed
            reason = "tool_calls" if parsed.get("tool_calls") else reason
        choice: dict[str, Any] = {"index": index, "message": message, "logprobs": None}
        if self._body.logprobs:
            choice["logprobs"] = self._written_logprobs(index, entries_of(end))
        if self._body.return_token_ids:
            choice["token_ids"] = end.tokens
        return choice | {"finish_reason": reason}

    def _parsed(self, end: Generation) -> dict[str, Any]:
        """Content and calls of an output, parsed by the tokenizer's response template."""
        ids = [token for token in end.tokens if token not in self._service.model.target.eos_token_ids]
        tools = [tool.model_dump(exclude_none=True) for tool in self._body.tools or ()]
        tokenizer = self._service.model.tokenizer
        try:
            parsed = tokenizer.parse_response(ids, prefix=list(self._run.request.prompts[0]), tools=tools)
        except Exception as error:  # a template may fail in any way on unexpected text
            _log.warning("the response template failed, so the answer is text: %s", error)
            return {"content": end.text}
        message = {"content": parsed.get("content")}
        calls = [
            _tool_call(new_id("call_"), call["function"]["name"], json.dumps(call["function"]["arguments"]))
            for call in parsed.get("tool_calls") or ()
        ]
        if self._body.parallel_tool_calls is False:
            calls = calls[:1]
        return message | ({"tool_calls": calls} if calls else {})

    def _logprobs(self, index: int, entries: Seq[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        wanted = self._body.top_logprobs or 0
        return {"content": [self._texts.chat(token, one, wanted) for token, one in entries], "refusal": None}

    # -- in chunks --

    def _first(self) -> Iterator[dict[str, Any]]:
        for index in range(self._run.request.n):
            choice = _delta(index, {"role": "assistant", "content": "", "refusal": None})
            yield {"choices": [choice]} | self._prompt_ids()

    def _choices(self, event: Event) -> Iterator[dict[str, Any]]:
        delta, reason = self._delta_of(event)
        more = self._details(event, bool(self._body.logprobs))
        if delta or more:
            yield _delta(event.index, delta or {"content": ""}) | more
        if event.end is not None:
            yield _delta(event.index, {}) | {"finish_reason": reason or FINISH[event.end.finish_reason]}

    def _delta_of(self, event: Event) -> tuple[dict[str, Any], str | None]:
        """The delta, and the finish reason if it is not the engine's."""
        if self._parses:
            parsed = {} if event.end is None else self._parsed(event.end)
            calls = [call | {"index": index} for index, call in enumerate(parsed.pop("tool_calls", ()))]
            delta = {name: value for name, value in parsed.items() if value}
            return delta | ({"tool_calls": calls} if calls else {}), "tool_calls" if calls else None
        if not self._names:
            return ({"content": event.text} if event.text else {}), None
        call = self._calls[event.index]
        known = call.name is not None
        piece = call.push(event.text)
        complete = event.end is not None and event.end.finish_reason != "length"
        if event.end is not None:
            piece += call.end(complete)
        reason = "tool_calls" if complete and call.name is not None else None
        if call.name is None or not (piece or not known):
            return {}, reason
        if known:
            return {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}, reason
        return {"tool_calls": [{"index": 0} | _tool_call(call.id, call.name, piece)]}, reason


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _tool_call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
