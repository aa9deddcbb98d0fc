"""``/v1/messages``, as Anthropic's: a thin adapter for text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from outpace.core import Generation
from outpace.serve import wire
from outpace.serve.ask import Ask, plain_text, turns_of
from outpace.serve.errors import Refused
from outpace.serve.runs import Run
from outpace.serve.service import Service
from outpace.serve.shapes import Stream, answer, event, extras, new_id

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


async def messages(service: Service, body: wire.Messages, salt: str | None) -> Response:
    """Handle a request in the format of Anthropic's messages."""

    async def ask() -> Ask:
        prompt = await _prompt(service, body)
        room = service.defaults.room([prompt], body.max_tokens)
        params = service.defaults.params(body, max_new_tokens=room, stop=body.stop_sequences)
        return Ask([prompt], params, salt=salt)

    run = await service.start(1, ask)
    if body.stream:
        return Stream(run, _events(service, body, run), lambda refused: event(error_body(refused), "error"))
    (one,) = await run.finish()
    found = _head(service, body) | _stop(service, body, one)
    found["content"] = [{"type": "text", "text": one.text}]
    found["usage"] = _usage(run, one)
    return answer(found | extras(run, [one], body.speculation_metrics, body.speculation))


async def count(service: Service, body: wire.CountTokens) -> dict[str, int]:
    """Count the tokens of a request."""
    return {"input_tokens": len(await _prompt(service, body))}


def error_body(refused: Refused) -> dict[str, Any]:
    """Anthropic's error object."""
    default = "invalid_request_error" if refused.status < 500 else "api_error"
    kind = "overloaded_error" if refused.status == 503 else _TYPES.get(refused.status, default)
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


async def _prompt(service: Service, body: wire.Messages | wire.CountTokens) -> list[int]:
    """Token ids up to the answer, which continues a last message of the assistant."""
    turns = await asyncio.to_thread(_turns, body)
    if turns[-1]["role"] != "assistant":
        return await service.conversation(turns)
    if not turns[-1]["content"]:
        return await service.conversation(turns[:-1])
    return await service.conversation(turns, add_generation_prompt=False, continue_final_message=True)


def _turns(body: wire.Messages | wire.CountTokens) -> list[dict[str, str]]:
    """The conversation, of which messages of one role that follow one another are one turn."""
    system = None if body.system is None else plain_text(body.system)
    turns = list[dict[str, str]]()
    for turn in turns_of(body.messages, system):
        if turns and turns[-1]["role"] == turn["role"]:
            turns[-1]["content"] += f"\n{turn['content']}"
        else:
            turns.append(turn)
    return turns


def _head(service: Service, body: wire.Messages) -> dict[str, Any]:
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


def _stop(service: Service, body: wire.Messages, one: Generation) -> dict[str, Any]:
    """The stop reason of an output, and the stop string that ended it."""
    if one.finish_reason != "stop":
        return {"stop_reason": "max_tokens" if one.finish_reason == "length" else "end_turn"}
    whole = service.model.tokenizer.decode(one.tokens, skip_special_tokens=True)
    rest = whole[len(one.text or "") :]
    found = min((stop for stop in body.stop_sequences or () if rest.startswith(stop)), key=len, default=None)
    return {"stop_reason": "stop_sequence", "stop_sequence": found}


def _usage(run: Run, one: Generation | None = None) -> dict[str, int]:
    cached = min(one.stats.cached_tokens, len(run.ask.prompts[0])) if one is not None else 0
    return {
        "input_tokens": len(run.ask.prompts[0]) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": 0 if one is None else len(one.tokens),
    }


async def _events(service: Service, body: wire.Messages, run: Run) -> AsyncIterator[bytes]:
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
    return event({"type": kind} | fields, kind)
