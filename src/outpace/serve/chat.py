"""``POST /v1/chat/completions``: its body, parsed to a request, and its response, whole and in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints
from starlette.responses import Response

from outpace.core import Generation, TokenLogprobs
from outpace.serve.answers import Said
from outpace.serve.constraints import Constrained, constraint_of
from outpace.serve.continuing import prompt_of
from outpace.serve.errors import Refused
from outpace.serve.fields import (
    INERT,
    PARTS,
    TURNS,
    Anything,
    Arguments,
    ChatParts,
    Int,
    Most,
    Object,
    OpenAI,
    TextAndImages,
    TextParts,
    Thoughts,
    Wire,
    content_of,
    plain_text,
)
from outpace.serve.formats import ending, new_id
from outpace.serve.request import ParsedRequest, check_stream, openai_params, salted
from outpace.serve.run import Event, Run
from outpace.serve.service import Service
from outpace.serve.tools import (
    Toolbox,
    allowed,
    answer_to,
    check_names,
    chosen,
    reasoning_of_answer,
)
from outpace.serve.writers import ChunkWriter, completed, entries_of, said_in

# -- the body ---------------------------------------------------------------------------------------------


class FunctionCall(Wire):
    name: str
    arguments: Arguments = "{}"
    parsed_arguments: Annotated[Any, INERT] = None


class ToolCall(Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[Int | None, INERT] = None
    provider_specific_fields: Annotated[Object | None, INERT] = None
    extra_content: Annotated[Object | None, INERT] = None


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | ChatParts | None, TextAndImages] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=PARTS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as vLLM and OpenRouter have it
    prefix: bool = False  # of the last message: the answer continues it, as for Mistral and DeepSeek
    partial: bool = False  # the same, as for Moonshot and Alibaba
    # Returned by clients as received
    annotations: Annotated[Anything | None, INERT] = None
    parsed: Annotated[Any, INERT] = None
    provider_specific_fields: Annotated[Object | None, INERT] = None  # LiteLLM's
    thinking_blocks: Annotated[Anything | None, INERT] = None  # LiteLLM's, beside reasoning_content
    reasoning_details: Annotated[Anything | None, INERT] = None  # OpenRouter's, beside reasoning


Conversation = Annotated[list[Message], Field(min_length=1, max_length=TURNS, fail_fast=True)]


class Function(Wire):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None  # which the template may show


class Tool(Wire):
    type: Literal["function"]
    function: Function


class Named(Wire):
    name: str


class NamedTool(Wire):
    type: Literal["function"]
    function: Named


class AllowedTools(Wire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128, fail_fast=True)]


class Allowed(Wire):
    """The tools of which the answer may call one, or must."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Prediction(Wire):
    type: Literal["content"]
    content: str | TextParts


class Chat(OpenAI, Constrained):
    """``POST /v1/chat/completions``."""

    messages: Conversation
    max_tokens: Most | None = None
    max_completion_tokens: Most | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | Allowed, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # tokens of reasoning at most, by vLLM's, llama-server's and DashScope's names
    thinking_token_budget: Thoughts | None = None
    thinking_budget_tokens: Thoughts | None = None
    thinking_budget: Thoughts | None = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(max_length=8, fail_fast=True)] | None, INERT
    ] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, INERT] = None


async def chat(service: Service, body: Chat, salt: str | None) -> Response:
    """Handle a chat request."""
    run = await service.start(body.n, lambda: _parse(service, body, salt))
    return await _ChatWriter(service, body, run).response()


# -- parsing -----------------------------------------------------------------------------------------


async def _parse(service: Service, body: Chat, salt: str | None) -> ParsedRequest:
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise Refused(400, "give max_completion_tokens or max_tokens, not both", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused(400, "top_logprobs needs logprobs: true", "top_logprobs")
    check_stream(body)
    box = toolbox(body)
    schema, constrained = constraint_of(body, body.min_tokens, box.grammar(service.dialogue))
    turns, options = await asyncio.to_thread(_turns, service, body, box)
    prompt = await prompt_of(service, body, turns, options)
    most = service.defaults.most_tokens([prompt.tokens], body.max_completion_tokens or body.max_tokens)
    prediction = None
    if body.prediction is not None:
        prediction = await service.prompts.tokens(plain_text(body.prediction.content), special=False)
    return ParsedRequest(
        [prompt.tokens],
        openai_params(body, service.defaults, most, (body.top_logprobs or 0) if body.logprobs else None),
        body.n,
        schema,
        prediction,
        salted(salt, body),
        body.trace,
        prompt.source,
        reasoning_of_answer(service, box, prompt.tokens, schema, *_thinking(body)),
        constrained,
    )


def _thinking(body: Chat) -> tuple[bool | None, int | None]:
    """Whether reasoning is asked for, and its budget; None for what the client does not say."""
    given = body.chat_template_kwargs or {}
    flags = [given[name] for name in ("enable_thinking", "thinking") if isinstance(given.get(name), bool)]
    wanted = body.reasoning_effort != "none" if body.reasoning_effort is not None else None
    budgets = {body.thinking_token_budget, body.thinking_budget_tokens, body.thinking_budget} - {None}
    if len(budgets) > 1:
        raise Refused(400, "give one of the budgets of thinking, not several", "thinking_token_budget")
    budget = budgets.pop() if budgets else None
    return flags[0] if flags else wanted, None if budget == -1 else budget


def _turns(service: Service, body: Chat, box: Toolbox) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversation in the format of chat templates, and their options."""
    effort = body.reasoning_effort
    options = service.dialogue.variables(None if effort is None else effort != "none", effort)
    options |= _template_options(service, body)
    turns, tools = service.dialogue.prepared([template_message(one) for one in body.messages], box.shown)
    return turns, options | tools


def _template_options(service: Service, body: Chat) -> dict[str, Any]:
    """The variables that a client gives the model's template: those that it reads, and no option of ours."""
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
        "content": content_of(message.refusal if message.content is None else message.content, message.role),
    }
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought is not None:
        turn["reasoning_content"] = thought
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


def toolbox(body: Chat) -> Toolbox:
    """The tools of a chat.

    Raises:
        Refused: one that must be called is not among them, there are none, or two have one name.
    """
    choice = body.tool_choice
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    if choice == "auto" and not tools:
        raise Refused(400, "tool_choice needs tools; leave it out", "tool_choice")
    check_names(tools)
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, Allowed):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        return Toolbox(*allowed(choice.allowed_tools.mode, names, tools), parallel)
    name = choice.function.name if isinstance(choice, NamedTool) else None
    how = None if isinstance(choice, NamedTool) else choice
    return Toolbox(tools, chosen(how, name, tools), parallel)


# -- formatting ------------------------------------------------------------------------------------------


class _ChatWriter(ChunkWriter[Chat]):
    """Writer of the events of one run in the format of OpenAI's chat."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: Chat, run: Run) -> None:
        super().__init__(service, body, run, toolbox(body))
        self._answers = [answer_to(service, self._box, run.request) for _ in range(run.request.n)]

    def _prompt_ids(self) -> dict[str, Any]:
        """The prompt's token ids, if requested."""
        return {"prompt_token_ids": self._run.request.prompts[0]} if self._body.return_token_ids else {}

    # -- in one piece --

    def _complete(self) -> dict[str, Any]:
        choices = (self._choice(event, one) for event, one in completed(self._run))
        return {"choices": choices, "service_tier": None} | self._prompt_ids()

    def _choice(self, event: Event, end: Generation) -> dict[str, Any]:
        answer = self._answers[event.index]
        said = said_in(answer, event)
        text, reasoning = (
            "".join(one.text for one in said if one.kind == kind) for kind in ("text", "reasoning")
        )
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if answer.calls:
            message["content"] = text or None
            message["tool_calls"] = calls_of(said)
        choice: dict[str, Any] = {"index": event.index, "message": message, "logprobs": None}
        if self._body.logprobs:
            choice["logprobs"] = self._written_logprobs(event.index, entries_of(end))
        if self._body.return_token_ids:
            choice["token_ids"] = end.tokens
        return choice | {"finish_reason": ending(end, answer.calls).chat}

    def _logprobs(self, index: int, entries: Seq[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        wanted = self._body.top_logprobs or 0
        return {"content": [self._texts.chat(token, one, wanted) for token, one in entries], "refusal": None}

    # -- in chunks --

    def _first(self) -> Iterator[dict[str, Any]]:
        for index in range(self._run.request.n):
            choice = _delta(index, {"role": "assistant", "content": "", "refusal": None})
            yield {"choices": [choice]} | self._prompt_ids()

    def _choices(self, event: Event) -> Iterator[dict[str, Any]]:
        answer, end = self._answers[event.index], event.end
        said = said_in(answer, event)
        more = self._details(event, self._body.logprobs)
        deltas = [self._written(one) for one in said] or ([{"content": ""}] if more else [])
        for place, delta in enumerate(deltas):
            yield _delta(event.index, delta) | (more if place == len(deltas) - 1 else {})
        if end is not None:
            yield _delta(event.index, {}) | {"finish_reason": ending(end, answer.calls).chat}

    def _written(self, one: Said) -> dict[str, Any]:
        """A piece of an answer as a delta."""
        if one.kind != "call":
            return {"content" if one.kind == "text" else "reasoning_content": one.text}
        if one.name is None:
            return {"tool_calls": [{"index": one.call, "function": {"arguments": one.text}}]}
        return {"tool_calls": [{"index": one.call} | _tool_call(one.name, one.text)]}


def calls_of(said: Seq[Said]) -> list[dict[str, Any]]:
    """The calls of a complete answer."""
    calls = [_tool_call(one.name, "") for one in said if one.name is not None]
    for one in said:
        if one.kind == "call":
            calls[one.call]["function"]["arguments"] += one.text
    return calls


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": {"name": name, "arguments": arguments}}
