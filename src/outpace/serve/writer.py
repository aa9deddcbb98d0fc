"""Common part of OpenAI's two older APIs: checks of a request, and the frame of its response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from collections.abc import Sequence as Seq
from typing import Any, ClassVar

from starlette.responses import Response

from outpace.core import TokenLogprobs
from outpace.serve import wire
from outpace.serve.errors import Refused
from outpace.serve.runs import Event, Run
from outpace.serve.service import Service
from outpace.serve.shapes import Stream, Words, answer, event, extras, new_id, usage


def check(body: wire.OpenAI) -> None:
    """Refuse options that need a stream.

    Raises:
        Refused: one is given for a response that is not streamed.
    """
    if body.stream_options is not None and not body.stream:
        raise Refused(400, "stream_options needs stream: true", "stream_options")
    if body.trace and not body.stream:
        raise Refused(400, "trace needs stream: true", "trace")


def salted(tenant: str | None, body: wire.OpenAI) -> str | None:
    """The salt of a request, from its key and its ``cache_salt``."""
    return None if tenant is None and body.cache_salt is None else f"{tenant}:{body.cache_salt}"


class Writer(ABC):
    """Writer of the events of one run in OpenAI's format; subclasses write the choices of its chunks.

    Attributes:
        prefix, kind, chunk_kind: of its id, and the name of its objects.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service, body: wire.OpenAI, run: Run) -> None:
        self._run, self._asked = run, body
        self._words = Words(service)
        self._emitted = 0
        self._head = {
            "id": new_id(self.prefix),
            "object": self.kind,
            "created": int(service.now()),
            "model": body.model or service.name,
            "system_fingerprint": service.fingerprint,
            **service.exactness,
        }

    async def response(self) -> Response:
        """The response, complete or as a stream, as requested."""
        if self._asked.stream:
            return Stream(self._run, self._chunks())
        await self._run.finish()
        counts = usage(self._run, self._run.generations)
        return answer(self._head | self._whole() | {"usage": counts} | self._extras())

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """The fields of a complete response, except head, usage and extras."""

    @abstractmethod
    def _first(self) -> Iterable[dict[str, Any]]:
        """Fields of the chunks before the first token."""

    @abstractmethod
    def _choices(self, one: Event) -> Iterable[dict[str, Any]]:
        """The choices of an event's chunks: its text, and the finish reason."""

    @abstractmethod
    def _logprobs(self, index: int, entries: Seq[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        """Log probabilities of tokens of a choice."""

    def _extras(self) -> dict[str, Any]:
        body = self._asked
        return extras(self._run, self._run.generations, body.speculation_metrics, body.speculation)

    async def _chunks(self) -> AsyncIterator[bytes]:
        """The response as server-sent events: the first chunks, each event, the end of the stream."""
        for fields in self._first():
            yield self._chunk(**fields)
        async for one in self._run.events():
            self._emitted += len(one.tokens)
            for choice in self._choices(one):
                yield self._chunk(choices=[choice])
        last, options = self._extras(), self._asked.stream_options
        if options is not None and options.include_usage:
            last["usage"] = usage(self._run, self._run.generations)
        if last:
            yield self._chunk(choices=[], **last)
        yield event(b"[DONE]")

    def _details(self, one: Event, logprobs: bool) -> dict[str, Any]:
        """Further fields of a chunk's choice: log probabilities, token ids, the trace of its steps."""
        found: dict[str, Any] = {}
        if not one.tokens:
            return found
        if logprobs:
            entries = [(token.token, token.logprobs) for token in one.tokens if token.logprobs is not None]
            found["logprobs"] = self._logprobs(one.index, entries)
        if self._asked.return_token_ids:
            found["token_ids"] = [token.token for token in one.tokens]
        trace = self._run.choices[one.index].trace
        if trace is not None:
            found["trace"] = trace.take(one.tokens, self._words.text)
        return found

    def _chunk(self, **fields: Any) -> bytes:
        options = self._asked.stream_options
        chunk = self._head | {"object": self.chunk_kind}
        if options is not None and options.include_usage:
            so_far = options.continuous_usage_stats
            chunk["usage"] = usage(self._run, self._run.generations, self._emitted) if so_far else None
        return event(chunk | fields)
