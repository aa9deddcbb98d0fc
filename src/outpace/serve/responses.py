"""``POST /v1/responses``, stateless: its handler and its response, whole and as events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json
from starlette.responses import Response

from outpace.core import Generation
from outpace.serve.errors import Refused
from outpace.serve.formats import ending, new_id, reasoned, sse, usage
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
from outpace.serve.tools import reasoning_of_answer
from outpace.serve.writers import Block, BlockWriter


async def responses(service: Service, body: Responses, salt: str | None) -> Response:
    run = await service.start(1, lambda: _parse(service, body, salt))
    return await _ResponsesWriter(service, body, run).response()


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


class _ResponsesWriter(BlockWriter[Responses]):
    """Writer of the events of one run in the format of OpenAI's responses."""

    def __init__(self, service: Service, body: Responses, run: Run) -> None:
        box, self._origins = toolbox(body)
        super().__init__(service, body, run, box)
        asked = body.text.format if body.text is not None else None
        form = ResponseFormat(type="text") if asked is None else asked
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(service.now()),
            "model": self._model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": self._box.parallel,
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

    def _response(self, end: Generation) -> dict[str, Any]:
        *before, last = self._blocks
        for block in before:
            block.status = "completed"
        last.status = status = ending(end).responses
        counts = usage(self._run)
        found = {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(block) for block in self._blocks],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoned(self._run)},
                "total_tokens": counts["total_tokens"],
            },
        }
        return self._head | found | self._extras()

    # -- as events ---------------------------------------------------------------------------------------

    def _begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)

    def _opened(self, block: Block) -> Iterator[bytes]:
        item, place = self._item(block), len(self._blocks) - 1
        shown = item | ({"content": []} if "content" in item else {})
        yield self._event("response.output_item.added", output_index=place, item=shown)
        if "content" in item:
            yield self._of_part("response.content_part.added", part=item["content"][0])

    def _added(self, block: Block, text: str) -> Iterator[bytes]:
        if block.kind == "text":
            yield self._of_part("response.output_text.delta", delta=text, logprobs=[])
        elif block.kind == "reasoning":
            yield self._of_part("response.reasoning_text.delta", delta=text)
        elif not self._origin(block).custom:
            yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _closed(self, block: Block, status: str = "completed") -> Iterator[bytes]:
        block.status = status
        item, place = self._item(block), len(self._blocks) - 1
        if block.kind == "text":
            yield self._of_part("response.output_text.done", text=block.text, logprobs=[])
        elif block.kind == "reasoning":
            yield self._of_part("response.reasoning_text.done", text=block.text)
        elif "input" in item:
            yield self._of_item("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._of_item("response.custom_tool_call_input.done", input=item["input"])
        else:
            told = {name: item[name] for name in ("name", "arguments")}
            yield self._of_item("response.function_call_arguments.done", **told)
        if "content" in item:
            yield self._of_part("response.content_part.done", part=item["content"][0])
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _finish(self, end: Generation) -> Iterator[bytes]:
        found = self._response(end)
        yield from self._closed(self._blocks[-1], found["status"])
        yield self._event(f"response.{found['status']}", response=found)

    def _error(self, refused: Refused) -> bytes:
        failed = {"code": refused.code or "server_error", "message": refused.message}
        return self._event("response.failed", response=self._head | {"status": "failed", "error": failed})

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": _id_of(self._blocks[-1]), "output_index": len(self._blocks) - 1}
        return self._event(kind, **place, **fields)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, "sequence_number": next(self._numbers)} | fields, kind)

    # -- items -------------------------------------------------------------------------------------------

    def _origin(self, block: Block) -> Origin:
        return self._origins.get(block.name, Origin(block.name))

    def _item(self, block: Block) -> dict[str, Any]:
        """A block as far as it goes."""
        text, status, own = block.text, {"status": block.status}, {"id": _id_of(block)}
        if block.kind == "text":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            return {**own, "type": "message", "role": "assistant", **status, "content": [part]}
        if block.kind == "reasoning":
            parts = {"content": [{"type": "reasoning_text", "text": text}], "encrypted_content": None}
            return {**own, "type": "reasoning", **status, "summary": [], **parts}
        origin = self._origin(block)
        called = {"call_id": f"call_{block.id}", "name": origin.name}
        if origin.namespace is not None:
            called["namespace"] = origin.namespace
        if origin.custom:
            kind, given = "custom_tool_call", {"input": _input(text)}
        else:
            kind, given = "function_call", {"arguments": text}
        return {**own, "type": kind, **status, **called, **given}


def _id_of(block: Block) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.id


def _choice(body: Responses) -> Any:
    choice = body.tool_choice or ("auto" if body.tools else "none")
    return choice if isinstance(choice, str) else choice.model_dump()


def _input(arguments: str) -> str:
    """The text that a call of a custom tool has, as far as it goes."""
    found = from_json(arguments or "{}", allow_partial="trailing-strings")
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""
