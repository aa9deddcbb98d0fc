"""``POST /infill``, as llama-server's: the text between two others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from outpace.core import Generation
from outpace.serve.fields import INERT, Int, Sampled, Seed, Stop, Stops, Wire
from outpace.serve.formats import EventStream, ending, extras, json_response, sse
from outpace.serve.request import SEEDS, ParsedRequest
from outpace.serve.run import Run
from outpace.serve.service import Service


class Extra(Wire):
    """A further file."""

    text: str
    filename: str = "tmp"


class Infill(Sampled):
    """``POST /infill``."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Extra], Field(max_length=1024, fail_fast=True, default_factory=list)]
    prompt: str = ""  # the end of the text before, from where the cursor's line begins
    n_predict: Annotated[Int, Field(ge=-1, le=2**31)] = -1
    stop: Stop | Stops | None = None
    seed: Seed | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # The prefix cache is used for every request, and slots are the engine's
    cache_prompt: Annotated[bool | None, INERT] = None
    id_slot: Annotated[Int | None, INERT] = None


async def infill(service: Service, body: Infill, salt: str | None) -> Response:
    """Handle a request for the text between two others."""

    async def parse() -> ParsedRequest:
        files = [(one.filename, one.text) for one in body.input_extra]
        tokens = await service.prompts.infill(body.input_prefix + body.prompt, body.input_suffix, files)
        most = service.defaults.most_tokens([tokens], None if body.n_predict < 0 else body.n_predict)
        params = service.defaults.params(
            body,
            max_new_tokens=most,
            stop=body.stop,
            seed=None if body.seed is None else body.seed % SEEDS,
            stop_token_ids=service.prompts.middle().ends,
        )
        return ParsedRequest([tokens], params, salt=salt)

    run = await service.start(1, parse)
    writer = _InfillWriter(service, body, run)
    if body.stream:
        return EventStream(run, writer.events())
    (one,) = await run.finish()
    return json_response(writer.whole(one))


class _InfillWriter:
    """Writer of the events of one run in llama-server's format."""

    def __init__(self, service: Service, body: Infill, run: Run) -> None:
        self._service, self._body, self._run = service, body, run

    def _piece(self, text: str, count: int) -> dict[str, Any]:
        return {
            "index": 0,
            "content": text,
            "stop": False,
            "tokens_predicted": count,
            "tokens_evaluated": len(self._run.request.prompts[0]),
        }

    def whole(self, one: Generation) -> dict[str, Any]:
        """The complete answer."""
        return self._piece(one.text or "", len(one.tokens)) | self._end(one)

    def _end(self, one: Generation) -> dict[str, Any]:
        more = extras(self._run, [one], self._body.speculation_metrics, self._body.speculation)
        return {
            "stop": True,
            "model": self._body.model or self._service.name,
            "tokens_cached": one.stats.cached_tokens,
            "truncated": False,
            "stop_type": ending(one).infill,
            "stopping_word": one.stopped_by.string or "",
            **self._service.exactness,
            **more,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        count = 0
        async for one in self._run.events():
            count += len(one.tokens)
            if one.end is not None:
                yield sse(self._piece(one.text, count) | self._end(one.end))
            elif one.text:
                yield sse(self._piece(one.text, count))
