"""``POST /v1/responses``, stateless, for text alone: its body and its response, whole and as events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from outpace.core import Generation
from outpace.serve.errors import Refused
from outpace.serve.fields import TURNS, Labelled, Most, Object, Parts, TextOnly, Wire, turns_of
from outpace.serve.formats import Stream, extras, json_response, new_id, sse, usage
from outpace.serve.request import ParsedRequest
from outpace.serve.run import Run
from outpace.serve.service import Service


class ResponseMessage(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | Parts, TextOnly]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseText(Wire):
    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None


class Responses(Labelled):
    """``POST /v1/responses``; nothing is stored."""

    input: str | Annotated[list[ResponseMessage], Field(min_length=1, max_length=TURNS, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Most | None = None
    text: ResponseText | None = None
    truncation: Literal["disabled"] | None = None


async def responses(service: Service, body: Responses, salt: str | None) -> Response:
    """Handle a request for a response."""
    run = await service.start(1, lambda: _parse(service, body, salt))
    writer = _Writer(service, body, run)
    if body.stream:
        return Stream(run, writer.events(), writer.error)
    (one,) = await run.finish()
    return json_response(writer.response(one))


async def _parse(service: Service, body: Responses, salt: str | None) -> ParsedRequest:
    asked = body.input
    if isinstance(asked, str):
        asked = [ResponseMessage(role="user", content=asked)]
    prompt = await service.prompts.conversation(await asyncio.to_thread(turns_of, asked, body.instructions))
    most = service.defaults.most_tokens([prompt], body.max_output_tokens)
    return ParsedRequest(
        [prompt], service.defaults.params(body, max_new_tokens=most), schema=_schema(body), salt=salt
    )


def _schema(body: Responses) -> dict[str, Any] | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.schema_ is None:
        raise Refused(400, "a format of type json_schema needs a schema", "text")
    return form.schema_


class _Writer:
    """Writer of the events of one run in the format of OpenAI's responses."""

    def __init__(self, service: Service, body: Responses, run: Run) -> None:
        self._body, self._run = body, run
        self._item = new_id("msg_")
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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": run.request.params.temperature,
            "top_p": run.request.params.top_p,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "none",
            "tools": [],
            "truncation": "disabled",
            "status": "in_progress",
            "output": [],
            "usage": None,
            **service.exactness,
        }
        self._numbers = itertools.count()

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [_part(text)]
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def response(self, one: Generation) -> dict[str, Any]:
        """The complete response."""
        cut = one.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        counts = usage(self._run, [one])
        found = self._head | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._message(one.text or "", status)],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }
        return found | extras(self._run, [one], self._body.speculation_metrics, self._body.speculation)

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)
        item = self._message("", "in_progress")
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **place, part=_part(""))
        async for one in self._run.events():
            if one.text:
                yield self._event("response.output_text.delta", **place, delta=one.text, logprobs=[])
        (end,) = self._run.generations
        whole, text = self.response(end), end.text or ""
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def error(self, refused: Refused) -> bytes:
        """The event that reports an error at the end of the stream."""
        failed = {"code": refused.code or "server_error", "message": refused.message}
        return self._event("response.failed", response=self._head | {"status": "failed", "error": failed})

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, "sequence_number": next(self._numbers)} | fields, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
