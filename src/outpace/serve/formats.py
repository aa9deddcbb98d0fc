"""Parts of responses that several APIs share: events, JSON in pieces, usage, log probabilities, endings."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic_core import to_json
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outpace.core import Generation, StopKind, TokenLogprobs
from outpace.serve.errors import Refused
from outpace.serve.run import Run
from outpace.serve.service import Service


class Ending(NamedTuple):
    """What ended a text, in each API's word."""

    chat: str
    messages: str
    responses: str
    infill: str


_OF_ITSELF = Ending("stop", "end_turn", "completed", "eos")
_CALLED = Ending("tool_calls", "tool_use", "completed", "eos")  # it has calls, and was not cut
# Texts that end in another way have no answer but an error.
ENDINGS: Mapping[StopKind, Ending] = MappingProxyType(
    {
        "end token": _OF_ITSELF,
        "stop token": _OF_ITSELF,
        "criterion": _OF_ITSELF,
        "stop string": Ending("stop", "stop_sequence", "completed", "word"),
        "limit": Ending("length", "max_tokens", "incomplete", "limit"),
    }
)
PIECE = 2**18  # bytes of a longer response that are sent at once
_log = logging.getLogger("outpace.serve")
_HEADERS = {"Cache-Control": "no-cache"}


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def json_response(body: dict[str, Any]) -> Response:
    return Response(to_json(body), media_type="application/json")


class Written(list[bytes]):
    """A part of a response that is JSON already, in pieces."""


def written(value: Any) -> Iterator[bytes]:
    """The JSON of a response in pieces; parts may be ``Written``, and an iterator is a list of its values."""
    if isinstance(value, Written):
        yield from value
    elif isinstance(value, dict):
        yield b"{"
        for place, (name, inner) in enumerate(value.items()):
            yield b"%s%s:" % (b"," if place else b"", to_json(name))
            yield from written(inner)
        yield b"}"
    elif isinstance(value, Iterator) or (isinstance(value, list) and value and isinstance(value[0], dict)):
        yield b"["
        for place, inner in enumerate(value):
            yield b"," if place else b""
            yield from written(inner)
        yield b"]"
    else:
        yield to_json(value)


def joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces of at least ``PIECE`` bytes; the last one is shorter."""
    held, size = [], 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


class LongResponse(StreamingResponse):
    """A JSON response that is written while it is sent, by threads: whole it may take gigabytes.

    Args:
        sent: is set once nothing is left to do.
    """

    def __init__(self, pieces: Iterator[bytes], sent: asyncio.Future[None]) -> None:
        self._sent = sent
        super().__init__(pieces, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sent.set_result(None)


def sse(data: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + (data if isinstance(data, bytes) else to_json(data)) + b"\n\n"


class EventStream(EventSourceResponse):
    """A response of server-sent events; an error after its head is reported as the last event.

    Args:
        chunks: the events, one or more in each.
        error: writes the event of an error.
    """

    def __init__(self, run: Run, chunks: AsyncIterator[bytes], error: Callable[[Refused], bytes]) -> None:
        limits = run.admission.limits
        self._run = run
        super().__init__(
            _guarded(chunks, error), headers=_HEADERS, ping=limits.ping, send_timeout=limits.send, sep="\n"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _log.warning("a client has accepted nothing for %g s, and is cut off", self.send_timeout)
        finally:
            self._run.close()  # also if the client disconnects before the first chunk


async def _guarded(chunks: AsyncIterator[bytes], error: Callable[[Refused], bytes]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield chunk
    except Refused as refused:
        yield error(refused)


def usage(run: Run, emitted: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object.

    Args:
        emitted: number of tokens so far, if not all choices have ended.
    """
    request, generations = run.request, run.generations
    prompt = sum(len(tokens) for tokens in request.prompts)
    completion = sum(len(one.tokens) for one in generations) if emitted is None else emitted
    # A prompt's tokens are counted once for all of its choices.
    firsts = zip(request.prompts, generations[:: request.n], strict=False)
    cached = sum(min(one.stats.cached_tokens, len(tokens)) for tokens, one in firsts)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details = dict[str, int]()
    if request.prediction is not None:
        drafted, accepted = (
            sum(one.stats.extra.get(f"reference_{what}", 0) for one in generations)
            for what in ("drafted", "accepted")
        )
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    if request.reasoning is not None:
        details["reasoning_tokens"] = reasoned(run)
    return found | ({"completion_tokens_details": details} if details else {})


def reasoned(run: Run) -> int:
    reasoning = run.request.reasoning
    return 0 if reasoning is None else sum(reasoning.count(run.model, one.tokens) for one in run.generations)


def speculative(generations: Seq[Generation]) -> dict[str, Any]:
    """Counts of drafting, as vLLM reports them (``--per-request-spec-decode-metrics summary``)."""
    stats = [one.stats for one in generations]
    steps, drafted, accepted = (
        sum(getattr(one, name) for one in stats) for name in ("steps", "drafted", "accepted")
    )
    longest = max((len(one.accepted_per_position) for one in stats), default=0)
    reached = [steps] + [
        sum(one.accepted_per_position[depth] for one in stats if depth < len(one.accepted_per_position))
        for depth in range(longest)
    ]
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }


class TokenTexts:
    """Tokens as clients see them: their text and their bytes. For one response, which repeats many."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._found: dict[int, str] = {}
        self._bytes: dict[int, list[int]] = {}

    def text(self, token: int) -> str:
        if token not in self._found:
            found = self._service.model.tokenizer.decode([token], skip_special_tokens=False)
            self._found[token] = str(found)
        return self._found[token]

    def bytes(self, token: int) -> list[int]:
        """The bytes of a token, also where they are part of a character."""
        if token not in self._bytes:
            try:
                found = self._service.grammars.constraints().tokenizer.decode_bytes([token])
            except Refused:  # a tokenizer that llguidance does not know
                found = self.text(token).encode()
            self._bytes[token] = list(found)
        return self._bytes[token]

    def chat(self, token: int, found: TokenLogprobs, wanted: int) -> dict[str, Any]:
        """One entry of a chat's ``logprobs.content``."""
        top = list(found.top.items())[:wanted]
        return self._entry(token, found.logprob) | {
            "top_logprobs": [self._entry(other, value) for other, value in top]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": self.bytes(token)}


def ending(one: Generation, calls: int = 0) -> Ending:
    """What ended an output with this number of calls."""
    kind = one.stopped_by.kind
    return _CALLED if calls and kind != "limit" else ENDINGS[kind]


def finite(logprob: float) -> float:
    """A log probability as JSON can write it."""
    return max(logprob, -9999.0)
