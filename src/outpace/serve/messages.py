"""``POST /v1/messages``, as Anthropic's: its handler and its response, whole and as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic_core import from_json
from starlette.responses import Response

from outpace.core import Generation
from outpace.serve.answers import Said
from outpace.serve.continuing import continued
from outpace.serve.errors import Refused
from outpace.serve.formats import EventStream, ending, extras, json_response, new_id, sse
from outpace.serve.messages_body import (
    CountTokens,
    Messages,
    Prompted,
    conversation,
    schema_of,
    thinking_of,
    toolbox,
)
from outpace.serve.request import ParsedRequest
from outpace.serve.run import Run
from outpace.serve.service import Service
from outpace.serve.texts import Prompt
from outpace.serve.tools import Toolbox, answer_to, reasoning_of_answer, whole


async def messages(service: Service, body: Messages, salt: str | None) -> Response:
    """Handle a request in the format of Anthropic's messages."""

    async def parse() -> ParsedRequest:
        if not all(stop.strip() for stop in body.stop_sequences or ()):  # as Anthropic
            raise Refused(400, "stop_sequences: one is whitespace alone; leave it out", "stop_sequences")
        box = toolbox(body)
        grammar = box.grammar(service.dialogue)
        schema = schema_of(body) if grammar is None else grammar  # a format is of texts: a call has none
        prompt = await _prompt(service, body, box)
        most = service.defaults.most_tokens([prompt.tokens], body.max_tokens)
        params = service.defaults.params(body, max_new_tokens=most, stop=body.stop_sequences)
        thought = reasoning_of_answer(service, box, prompt.tokens, schema, *thinking_of(body))
        return ParsedRequest(
            [prompt.tokens], params, schema=schema, salt=salt, source=prompt.source, reasoning=thought
        )

    run = await service.start(1, parse)
    writer = _MessagesWriter(service, body, run)
    if body.stream:
        return writer.box.named(
            EventStream(run, writer.events(), lambda refused: sse(refused.anthropic(), "error"))
        )
    (one,) = await run.finish()
    return writer.box.named(json_response(await asyncio.to_thread(writer.whole, one)))


async def count_tokens(service: Service, body: CountTokens, salt: str | None) -> Response:
    """Handle a request for the number of tokens of a prompt."""
    box = toolbox(body)

    async def count() -> Response:
        return json_response({"input_tokens": len((await _prompt(service, body, box)).tokens)})

    return box.named(await service.work(count))


async def _prompt(service: Service, body: Prompted, box: Toolbox) -> Prompt:
    """The prompt up to the answer, which continues a last message of the assistant."""
    turns, options = await asyncio.to_thread(conversation, service, body, box)
    if not turns or turns[-1]["role"] != "assistant":
        return await service.prompts.conversation(turns, **options)
    if turns[-1]["content"][-1:].isspace():  # as Anthropic
        raise Refused(400, "messages: a last one of the assistant ends in whitespace; strip it", "messages")
    return await continued(service, turns, options)


class _MessagesWriter:
    """Writer of the events of one run in the format of Anthropic's messages.

    Attributes:
        box: the tools of the request.
    """

    def __init__(self, service: Service, body: Messages, run: Run) -> None:
        self._service, self._body, self._run, self.box = service, body, run, toolbox(body)
        request = run.request
        self._answer = answer_to(service, self.box, request)
        self._blocks = 0
        self._open: tuple[str, int] | None = None  # kind and call of the open block

    def whole(self, one: Generation) -> dict[str, Any]:
        """The complete message."""
        said = [*self._answer.push(whole(one)), *self._answer.end(one.finish_reason != "length")]
        blocks = list[dict[str, Any]]()
        for piece in said:
            if self._opens(piece):
                blocks.append(_block(piece) | ({"input": ""} if piece.kind == "call" else {}))
            blocks[-1][_FIELDS[piece.kind]] += piece.text
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _input(block["input"])
        found = self._head() | self._stop(one)
        found["content"] = blocks or [{"type": "text", "text": ""}]
        found["usage"] = _usage(self._run, one)
        return found | self._extras(one)

    async def events(self) -> AsyncIterator[bytes]:
        """The message as server-sent events."""
        yield _event("message_start", message=self._head() | {"usage": _usage(self._run)})
        async for one in self._run.events():
            for piece in self._answer.push(one.tokens):
                for event in self._written(piece):
                    yield event
        (end,) = self._run.generations
        for piece in self._answer.end(end.finish_reason != "length"):
            for event in self._written(piece):
                yield event
        if not self._blocks:  # a message has at least one
            for event in self._written(Said("text", "")):
                yield event
        for event in self._closed():
            yield event
        delta = {"stop_sequence": None} | self._stop(end)
        yield _event("message_delta", delta=delta, usage=_usage(self._run, end), **self._extras(end))
        yield _event("message_stop")

    def _opens(self, piece: Said) -> bool:
        """True if a piece begins a block."""
        before, self._open = self._open, (piece.kind, piece.call)
        return before != self._open

    def _written(self, piece: Said) -> Iterator[bytes]:
        """The events of a piece of the answer."""
        before = self._open
        if self._opens(piece):
            if before is not None:
                yield from self._stopped(before[0])
            block = _block(piece)
            yield _event("content_block_start", index=self._blocks, content_block=block)
            self._blocks += 1
        if piece.text:
            field = _FIELDS[piece.kind] if piece.kind != "call" else "partial_json"
            delta = {"type": _DELTAS[piece.kind], field: piece.text}
            yield _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _closed(self) -> Iterator[bytes]:
        if self._open is not None:
            yield from self._stopped(self._open[0])

    def _stopped(self, kind: str) -> Iterator[bytes]:
        """The events that end a block."""
        if kind == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            yield _event("content_block_delta", index=self._blocks - 1, delta=delta)
        yield _event("content_block_stop", index=self._blocks - 1)

    def _head(self) -> dict[str, Any]:
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self._body.model or self._service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **self._service.exactness,
        }

    def _stop(self, one: Generation) -> dict[str, Any]:
        """The stop reason of an output, and the stop string that ended it."""
        if self._answer.calls and one.stopped_by.kind != "limit":
            return {"stop_reason": "tool_use"}
        return {"stop_reason": ending(one).messages, "stop_sequence": one.stopped_by.string}

    def _extras(self, one: Generation) -> dict[str, Any]:
        return extras(self._run, [one], self._body.speculation_metrics, self._body.speculation)


_FIELDS = {"text": "text", "reasoning": "thinking", "call": "input"}
_DELTAS = {"text": "text_delta", "reasoning": "thinking_delta", "call": "input_json_delta"}


def _block(piece: Said) -> dict[str, Any]:
    """The block that a piece begins, empty."""
    if piece.kind == "call":
        return {"type": "tool_use", "id": new_id("toolu_"), "name": piece.name, "input": {}}
    if piece.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _input(text: str) -> Any:
    """The arguments of a call as an object, as far as they go if it was cut off."""
    found = from_json(text or "{}", allow_partial="trailing-strings")
    return found if isinstance(found, dict) else {}


def _usage(run: Run, one: Generation | None = None) -> dict[str, int]:
    cached = min(one.stats.cached_tokens, len(run.request.prompts[0])) if one is not None else 0
    return {
        "input_tokens": len(run.request.prompts[0]) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": 0 if one is None else len(one.tokens),
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind} | fields, kind)
