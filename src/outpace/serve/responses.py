"""``POST /v1/responses``, stateless: its handler and its response, whole and as events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from pydantic_core import from_json
from starlette.responses import Response

from outpace.core import Generation
from outpace.serve.answers import Said
from outpace.serve.errors import Refused
from outpace.serve.formats import EventStream, ending, extras, json_response, new_id, reasoned, sse, usage
from outpace.serve.request import ParsedRequest
from outpace.serve.responses_body import (
    Origin,
    ResponseFormat,
    Responses,
    conversation,
    schema_of,
    thinking_of,
    toolbox,
)
from outpace.serve.run import Run
from outpace.serve.service import Service
from outpace.serve.tools import answer_to, reasoning_of_answer, whole


async def responses(service: Service, body: Responses, salt: str | None) -> Response:
    """Handle a request for a response."""
    run = await service.start(1, lambda: _parse(service, body, salt))
    writer = _ResponsesWriter(service, body, run)
    if body.stream:
        return writer.box.named(EventStream(run, writer.events(), writer.error))
    (one,) = await run.finish()
    return writer.box.named(json_response(await asyncio.to_thread(writer.whole, one)))


async def _parse(service: Service, body: Responses, salt: str | None) -> ParsedRequest:
    box, _ = toolbox(body)
    grammar = box.grammar(service.dialogue)
    schema = schema_of(body) if grammar is None else grammar  # a format is of texts: a call has none
    turns, options = await asyncio.to_thread(conversation, service, body, box)
    prompt = await service.prompts.conversation(turns, **options)
    most = service.defaults.most_tokens([prompt.tokens], body.max_output_tokens)
    params = service.defaults.params(body, max_new_tokens=most)
    thought = reasoning_of_answer(service, box, prompt.tokens, schema, *thinking_of(body))
    return ParsedRequest(
        [prompt.tokens], params, schema=schema, salt=salt, source=prompt.source, reasoning=thought
    )


class _ResponsesWriter:
    """Writer of the events of one run in the format of OpenAI's responses.

    Attributes:
        box: the tools of the request.
    """

    def __init__(self, service: Service, body: Responses, run: Run) -> None:
        self._body, self._run = body, run
        self.box, self._origins = toolbox(body)
        request = run.request
        self._answer = answer_to(service, self.box, request)
        self._items = list[dict[str, Any]]()
        self._open: tuple[str, int] | None = None  # kind and call of the last item
        asked = body.text.format if body.text is not None else None
        form = ResponseFormat(type="text") if asked is None else asked
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(service.now()),
            "model": body.model or service.name,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": self.box.parallel,
            "previous_response_id": None,
            "store": False,
            "temperature": run.request.params.temperature,
            "top_p": run.request.params.top_p,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": _choice(body),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "truncation": body.truncation or "disabled",
            "status": "in_progress",
            "output": [],
            "usage": None,
            **service.exactness,
        }
        self._numbers = itertools.count()

    def whole(self, one: Generation) -> dict[str, Any]:
        """The complete response."""
        for piece in [*self._answer.push(whole(one)), *self._answer.end(one.finish_reason != "length")]:
            self._add(piece)
        return self._response(one)

    def _response(self, one: Generation) -> dict[str, Any]:
        status = ending(one).responses
        counts = usage(self._run, [one])
        if not self._items:
            self._add(Said("text", ""))
        self._items[-1]["status"] = status
        found = self._head | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [_shown(item) for item in self._items],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoned(self._run, [one])},
                "total_tokens": counts["total_tokens"],
            },
        }
        return found | extras(self._run, [one], self._body.speculation_metrics, self._body.speculation)

    def _add(self, piece: Said) -> bool:
        """Add a piece of the answer to its item; true if it begins one."""
        before, self._open = self._open, (piece.kind, piece.call)
        begins = before != self._open
        if begins:
            if self._items:
                self._items[-1]["status"] = "completed"
            self._items.append(_item(piece, self._origins))
        item = self._items[-1]
        if piece.kind == "call":
            item["arguments"] += piece.text
        else:
            item["content"][0]["text"] += piece.text
        return begins

    # -- as events ---------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)
        async for one in self._run.events():
            for piece in self._answer.push(one.tokens):
                for event in self._written(piece):
                    yield event
        (end,) = self._run.generations
        rest = self._answer.end(end.finish_reason != "length")
        if not (self._items or rest):
            rest = [Said("text", "")]
        for piece in rest:
            for event in self._written(piece):
                yield event
        found = self._response(end)
        for event in self._closed():
            yield event
        yield self._event(f"response.{found['status']}", response=found)

    def _written(self, piece: Said) -> Iterator[bytes]:
        """The events of a piece of the answer."""
        if self._open not in (None, (piece.kind, piece.call)):
            self._items[-1]["status"] = "completed"
            yield from self._closed()
        if self._add(piece):
            yield from self._begun(piece)
        if not piece.text:
            return
        if piece.kind == "text":
            yield self._of_part("response.output_text.delta", delta=piece.text, logprobs=[])
        elif piece.kind == "reasoning":
            yield self._of_part("response.reasoning_text.delta", delta=piece.text)
        elif self._items[-1]["type"] == "function_call":
            yield self._of_item("response.function_call_arguments.delta", delta=piece.text)

    def _begun(self, piece: Said) -> Iterator[bytes]:
        """The events that begin the last item."""
        item, place = _shown(self._items[-1]), len(self._items) - 1
        empty: dict[str, Any] = {"content": []} if piece.kind != "call" else {}
        empty |= {name: "" for name in ("arguments", "input") if name in item}
        yield self._event("response.output_item.added", output_index=place, item=item | empty)
        if piece.kind != "call":
            part = self._items[-1]["content"][0] | {"text": ""}
            yield self._of_part("response.content_part.added", part=part)

    def _closed(self) -> Iterator[bytes]:
        """The events that end the last item."""
        item, place = self._items[-1], len(self._items) - 1
        if item["type"] == "message":
            text = item["content"][0]["text"]
            yield self._of_part("response.output_text.done", text=text, logprobs=[])
        elif item["type"] == "reasoning":
            yield self._of_part("response.reasoning_text.done", text=item["content"][0]["text"])
        elif item["type"] == "custom_tool_call":
            given = _input(item["arguments"])
            yield self._of_item("response.custom_tool_call_input.delta", delta=given)
            yield self._of_item("response.custom_tool_call_input.done", input=given)
        else:
            name, arguments = item["name"], item["arguments"]
            yield self._of_item("response.function_call_arguments.done", name=name, arguments=arguments)
        if "content" in item:
            yield self._of_part("response.content_part.done", part=item["content"][0])
        yield self._event("response.output_item.done", output_index=place, item=_shown(item))

    def error(self, refused: Refused) -> bytes:
        """The event that reports an error at the end of the stream."""
        failed = {"code": refused.code or "server_error", "message": refused.message}
        return self._event("response.failed", response=self._head | {"status": "failed", "error": failed})

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **fields)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, "sequence_number": next(self._numbers)} | fields, kind)


def _choice(body: Responses) -> Any:
    choice = body.tool_choice or ("auto" if body.tools else "none")
    return choice if isinstance(choice, str) else choice.model_dump()


def _item(piece: Said, origins: Mapping[str, Origin]) -> dict[str, Any]:
    """The item that a piece begins, empty."""
    if piece.kind == "text":
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "status": "in_progress"}
        return {**head, "content": [part]}
    if piece.kind == "reasoning":
        parts = {"content": [{"type": "reasoning_text", "text": ""}], "encrypted_content": None}
        return {"id": new_id("rs_"), "type": "reasoning", "status": "in_progress", "summary": [], **parts}
    name = piece.name or ""
    origin = origins.get(name, Origin(name))
    kind = "custom_tool_call" if origin.custom else "function_call"
    item: dict[str, Any] = {"id": new_id("fc_"), "type": kind, "status": "in_progress"}
    item |= {"call_id": new_id("call_"), "name": origin.name, "arguments": ""}
    return item | ({} if origin.namespace is None else {"namespace": origin.namespace})


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    """An item as clients see it."""
    if item["type"] != "custom_tool_call":
        return item
    arguments = item["arguments"]
    return {name: value for name, value in item.items() if name != "arguments"} | {"input": _input(arguments)}


def _input(arguments: str) -> str:
    """The text that a call of a custom tool has, as far as it goes."""
    found = from_json(arguments or "{}", allow_partial="trailing-strings")
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""
