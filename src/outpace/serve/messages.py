"""``POST /v1/messages``, as Anthropic's: its handler and its response, whole and as events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json
from starlette.responses import Response

from outpace.core import Generation
from outpace.serve.continuing import continued
from outpace.serve.errors import Refused
from outpace.serve.formats import ending, json_response, new_id, sse
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
from outpace.serve.service import Service
from outpace.serve.texts import Prompt
from outpace.serve.tools import Toolbox, reasoning_of_answer
from outpace.serve.writers import Block, BlockWriter


async def messages(service: Service, body: Messages, salt: str | None) -> Response:

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

    return await _MessagesWriter(service, body, await service.start(1, parse), toolbox(body)).response()


async def count_tokens(service: Service, body: CountTokens, salt: str | None) -> Response:
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


class _MessagesWriter(BlockWriter[Messages]):
    """Writer of the events of one run in the format of Anthropic's messages."""

    def _response(self, end: Generation) -> dict[str, Any]:
        content = [_shown(block) for block in self._blocks]
        return (
            self._head() | self._stop(end) | {"content": content, "usage": self._usage(end)} | self._extras()
        )

    def _begin(self) -> Iterator[bytes]:
        yield _event("message_start", message=self._head() | {"usage": self._usage()})

    def _opened(self, block: Block) -> Iterator[bytes]:
        yield self._of_block("content_block_start", content_block=_shown(block))

    def _added(self, block: Block, text: str) -> Iterator[bytes]:
        name, field = _DELTAS[block.kind]
        yield self._of_block("content_block_delta", delta={"type": name, field: text})

    def _closed(self, block: Block) -> Iterator[bytes]:
        if block.kind == "reasoning":
            yield self._of_block("content_block_delta", delta={"type": "signature_delta", "signature": ""})
        yield self._of_block("content_block_stop")

    def _finish(self, end: Generation) -> Iterator[bytes]:
        yield from self._closed(self._blocks[-1])
        yield _event("message_delta", delta=self._stop(end), usage=self._usage(end), **self._extras())
        yield _event("message_stop")

    def _error(self, refused: Refused) -> bytes:
        return sse(refused.anthropic(), "error")

    def _of_block(self, kind: str, **fields: Any) -> bytes:
        return _event(kind, index=len(self._blocks) - 1, **fields)

    def _head(self) -> dict[str, Any]:
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **self._service.exactness,
        }

    def _stop(self, end: Generation) -> dict[str, Any]:
        """The stop reason of an output, and the stop string that ended it."""
        reason = ending(end, self._answer.calls).messages
        string = end.stopped_by.string if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": string}

    def _usage(self, end: Generation | None = None) -> dict[str, int]:
        prompt = len(self._run.request.prompts[0])
        cached = 0 if end is None else min(end.stats.cached_tokens, prompt)
        return {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0 if end is None else len(end.tokens),
        }


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _shown(block: Block) -> dict[str, Any]:
    """A block as far as it goes; so is the object of a call's arguments if it was cut off."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    found = from_json(block.text or "{}", allow_partial="trailing-strings")
    arguments = found if isinstance(found, dict) else {}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind} | fields, kind)
