"""``POST /v1/messages``, as Anthropic's, for text alone: its body and its response, whole and as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from outpace.core import Generation
from outpace.serve.errors import Refused
from outpace.serve.fields import (
    TURNS,
    Most,
    Object,
    Sampled,
    Stops,
    TextOnly,
    TextParts,
    Wire,
    plain_text,
    turns_of,
)
from outpace.serve.formats import Stream, extras, json_response, new_id, sse
from outpace.serve.request import ParsedRequest
from outpace.serve.run import Run
from outpace.serve.service import Service


class AnthropicError(Wire):
    type: str
    message: str


class AnthropicFailure(Wire):
    """The body of an error response in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicError


class AnthropicTurn(Wire):
    role: Literal["user", "assistant"]
    content: Annotated[str | TextParts, TextOnly]


AnthropicTurns = Annotated[list[AnthropicTurn], Field(min_length=1, max_length=TURNS, fail_fast=True)]


class CountTokens(Wire):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: AnthropicTurns
    system: str | TextParts | None = None


class Messages(Sampled):
    """``POST /v1/messages`` of Anthropic's API."""

    messages: AnthropicTurns
    system: str | TextParts | None = None
    max_tokens: Most
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Stops | None = None
    metadata: Object | None = None
    service_tier: str | None = None


async def messages(service: Service, body: Messages, salt: str | None) -> Response:
    """Handle a request in the format of Anthropic's messages."""

    async def parse() -> ParsedRequest:
        if not all(stop.strip() for stop in body.stop_sequences or ()):  # as Anthropic
            raise Refused(400, "stop_sequences: one is whitespace alone; leave it out", "stop_sequences")
        prompt = await _prompt(service, body)
        most = service.defaults.most_tokens([prompt], body.max_tokens)
        params = service.defaults.params(body, max_new_tokens=most, stop=body.stop_sequences)
        return ParsedRequest([prompt], params, salt=salt)

    run = await service.start(1, parse)
    if body.stream:
        return Stream(run, _events(service, body, run), lambda refused: sse(refused.anthropic(), "error"))
    (one,) = await run.finish()
    found = _head(service, body) | _stop(service, body, one)
    found["content"] = [{"type": "text", "text": one.text}]
    found["usage"] = _usage(run, one)
    return json_response(found | extras(run, [one], body.speculation_metrics, body.speculation))


async def count_tokens(service: Service, body: CountTokens, salt: str | None) -> Response:
    """Handle a request for the number of tokens of a prompt."""

    async def count() -> Response:
        return json_response({"input_tokens": len(await _prompt(service, body))})

    return await service.work(count)


async def _prompt(service: Service, body: Messages | CountTokens) -> list[int]:
    """Token ids up to the answer, which continues a last message of the assistant."""
    turns = await asyncio.to_thread(_turns, body)
    if turns[-1]["role"] != "assistant":
        return await service.prompts.conversation(turns)
    if turns[-1]["content"][-1:].isspace():  # as Anthropic
        raise Refused(400, "messages: a last one of the assistant ends in whitespace; strip it", "messages")
    if not turns[-1]["content"]:
        return await service.prompts.conversation(turns[:-1])
    return await service.prompts.conversation(turns, add_generation_prompt=False, continue_final_message=True)


def _turns(body: Messages | CountTokens) -> list[dict[str, str]]:
    """The conversation, of which messages of one role that follow one another are one turn."""
    system = None if body.system is None else plain_text(body.system)
    turns = list[dict[str, str]]()
    for turn in turns_of(body.messages, system):
        if turns and turns[-1]["role"] == turn["role"]:
            turns[-1]["content"] += f"\n{turn['content']}"
        else:
            turns.append(turn)
    return turns


def _head(service: Service, body: Messages) -> dict[str, Any]:
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": body.model or service.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        **service.exactness,
    }


def _stop(service: Service, body: Messages, one: Generation) -> dict[str, Any]:
    """The stop reason of an output, and the stop string that ended it."""
    if one.finish_reason != "stop":
        return {"stop_reason": "max_tokens" if one.finish_reason == "length" else "end_turn"}
    whole = service.model.tokenizer.decode(one.tokens, skip_special_tokens=True)
    rest = whole[len(one.text or "") :]
    found = min((stop for stop in body.stop_sequences or () if rest.startswith(stop)), key=len, default=None)
    return {"stop_reason": "stop_sequence", "stop_sequence": found}


def _usage(run: Run, one: Generation | None = None) -> dict[str, int]:
    cached = min(one.stats.cached_tokens, len(run.request.prompts[0])) if one is not None else 0
    return {
        "input_tokens": len(run.request.prompts[0]) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": 0 if one is None else len(one.tokens),
    }


async def _events(service: Service, body: Messages, run: Run) -> AsyncIterator[bytes]:
    head = _head(service, body) | {"usage": _usage(run)}
    yield _event("message_start", message=head)
    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    async for one in run.events():
        if one.text:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": one.text})
    yield _event("content_block_stop", index=0)
    (end,) = run.generations
    delta = {"stop_sequence": None} | _stop(service, body, end)
    more = extras(run, [end], body.speculation_metrics, body.speculation)
    yield _event("message_delta", delta=delta, usage=_usage(run, end), **more)
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind} | fields, kind)
