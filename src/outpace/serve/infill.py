"""``POST /infill``, as llama-server's: the text between two others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from outpace.core import Generation
from outpace.serve.fields import INERT, Int, Sampled, Seed, Stop, Stops, Wire
from outpace.serve.formats import ending, sse
from outpace.serve.request import SEEDS, ParsedRequest
from outpace.serve.service import Service
from outpace.serve.writers import Writer


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

    return await _InfillWriter(service, body, await service.start(1, parse)).response()


class _InfillWriter(Writer[Infill]):
    """Writer of the events of one run in llama-server's format."""

    def _piece(self, text: str, count: int, end: Generation | None) -> dict[str, Any]:
        piece = {
            "index": 0,
            "content": text,
            "stop": end is not None,
            "tokens_predicted": count,
            "tokens_evaluated": len(self._run.request.prompts[0]),
        }
        if end is None:
            return piece
        return piece | {
            "model": self._model,
            "tokens_cached": end.stats.cached_tokens,
            "truncated": False,
            "stop_type": ending(end).infill,
            "stopping_word": end.stopped_by.string or "",
            **self._service.exactness,
            **self._extras(),
        }

    def _whole(self) -> dict[str, Any]:
        (one,) = self._run.generations
        return self._piece(one.text or "", len(one.tokens), one)

    async def _events(self) -> AsyncIterator[bytes]:
        count = 0
        async for one in self._run.events():
            count += len(one.tokens)
            if one.text or one.end is not None:
                yield sse(self._piece(one.text, count, one.end))
