"""Writers of responses: one run in the format of an API, in one piece or as events."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar

from pydantic_core import to_json
from starlette.responses import Response

from outpace.core import Generation, StreamedToken, TokenLogprobs
from outpace.serve.answers import Answer, Kind, Said
from outpace.serve.errors import Refused
from outpace.serve.fields import OpenAI, Sampled
from outpace.serve.formats import (
    PIECE,
    EventStream,
    LongResponse,
    TokenTexts,
    Written,
    joined,
    new_id,
    speculative,
    sse,
    usage,
    written,
)
from outpace.serve.run import Event, Run
from outpace.serve.service import Service
from outpace.serve.tools import Templated, Toolbox, answer_to

B = TypeVar("B", bound=Sampled)
C = TypeVar("C", bound=OpenAI)
_AT_ONCE = 256  # tokens whose log probabilities are written at once, while other threads wait


class Writer(ABC, Generic[B]):
    """Base of the writers, one for each API."""

    def __init__(self, service: Service, body: B, run: Run, box: Toolbox | None = None) -> None:
        self._service, self._body, self._run = service, body, run
        self._box = Toolbox() if box is None else box
        self._model = body.model or service.name

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """The response in one piece, of parts as ``written`` takes them."""

    @abstractmethod
    def _events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""

    def _error(self, refused: Refused) -> bytes:
        return sse(refused.openai())

    async def response(self) -> Response:
        if self._body.stream:
            return self._box.named(EventStream(self._run, self._events(), self._error))
        sent = asyncio.get_running_loop().create_future()
        self._run.ticket.hold(sent)  # what a slow client has not read takes room
        try:
            await self._run.finish()
            pieces = self._pieces()
            first = await asyncio.to_thread(next, pieces)
        except BaseException:
            sent.set_result(None)
            raise
        if len(first) >= PIECE:
            return self._box.named(LongResponse(chain([first], pieces), sent))
        sent.set_result(None)
        return self._box.named(Response(first, media_type="application/json"))

    def _pieces(self) -> Iterator[bytes]:
        yield from joined(written(self._whole()))

    def _extras(self) -> dict[str, Any]:
        """Fields that outpace adds to a response on request: the drafter and its counts."""
        found: dict[str, Any] = {}
        if self._body.speculation is not None:
            most = self._run.request.params.drafts.num_speculative_tokens
            found["speculation"] = {"drafter": self._run.used, "num_speculative_tokens": most}
        if self._body.speculation_metrics:
            found["metrics"] = {"speculative_decoding": speculative(self._run.generations)}
        return found


def completed(run: Run) -> Iterator[tuple[Event, Generation]]:
    """The outputs of a run that has ended, each with an event as if it had come in one piece."""
    for index, one in enumerate(run.generations):
        last = len(one.tokens) - 1
        tokens = [
            StreamedToken(token, 0, (one.text or "") if place == last else "")
            for place, token in enumerate(one.tokens)
        ]
        yield Event(index, tokens, one), one


def said_in(answer: Answer | Templated, event: Event) -> list[Said]:
    """What an answer says by an event, and with the last one the rest of it."""
    said = answer.push(event.tokens)
    if event.end is not None:
        said += answer.end(event.end.stopped_by.kind != "limit")
    return said


class ChunkWriter(Writer[C]):
    """Base of the writers of chat and completions, whose choices come in chunks of one form.

    Attributes:
        prefix, kind, chunk_kind: of its id, and the name of its objects.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service, body: C, run: Run, box: Toolbox | None = None) -> None:
        super().__init__(service, body, run, box)
        self._texts = TokenTexts(service)
        self._emitted = 0
        self._head = {
            "id": new_id(self.prefix),
            "object": self.kind,
            "created": int(service.now()),
            "model": self._model,
            "system_fingerprint": service.fingerprint,
            **service.exactness,
        }

    def _whole(self) -> dict[str, Any]:
        return self._head | self._complete() | {"usage": usage(self._run)} | self._extras()

    @abstractmethod
    def _complete(self) -> dict[str, Any]:
        """The fields of a complete response, except head, usage and extras."""

    @abstractmethod
    def _first(self) -> Iterable[dict[str, Any]]:
        """Fields of the chunks before the first token."""

    @abstractmethod
    def _choices(self, event: Event) -> Iterable[dict[str, Any]]:
        """The choices of an event's chunks: its text, and the finish reason."""

    @abstractmethod
    def _logprobs(self, index: int, entries: Seq[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        """Log probabilities of tokens of a choice."""

    def _written_logprobs(self, index: int, entries: Seq[tuple[int, Any]]) -> dict[str, Any]:
        """``_logprobs`` of any number of tokens, written a few at a time: as objects all take gigabytes."""
        parts: dict[str, list[bytes]] = {}
        found: dict[str, Any] = {}
        for start in range(0, len(entries) or 1, _AT_ONCE):
            found = self._logprobs(index, entries[start : start + _AT_ONCE])
            for name, values in found.items():
                if isinstance(values, list) and values:
                    parts.setdefault(name, []).append(to_json(values)[1:-1])
        return found | {name: Written(_list_of(part)) for name, part in parts.items()}

    async def _events(self) -> AsyncIterator[bytes]:
        first = iter(self._first())
        while (fields := await asyncio.to_thread(next, first, None)) is not None:
            yield self._chunk(**fields)
        async for event in self._run.events():
            self._emitted += len(event.tokens)
            told = any(token.logprobs is not None for token in event.tokens)
            for chunk in await asyncio.to_thread(self._event, event) if told else self._event(event):
                yield chunk
        last, options = self._extras(), self._body.stream_options
        if options is not None and options.include_usage:
            last["usage"] = usage(self._run)
        if last:
            yield self._chunk(choices=[], **last)
        yield sse(b"[DONE]")

    def _event(self, event: Event) -> list[bytes]:
        """The chunks of an event; a thread writes those with log probabilities, which may be many."""
        return [self._chunk(choices=[choice]) for choice in self._choices(event)]

    def _details(self, event: Event, logprobs: bool) -> dict[str, Any]:
        """Further fields of a chunk's choice: log probabilities, token ids, the trace of its steps."""
        details: dict[str, Any] = {}
        if not event.tokens:
            return details
        if logprobs:
            entries = [(token.token, token.logprobs) for token in event.tokens if token.logprobs is not None]
            details["logprobs"] = self._written_logprobs(event.index, entries)
        if self._body.return_token_ids:
            details["token_ids"] = [token.token for token in event.tokens]
        trace = self._run.choices[event.index].trace
        if trace is not None:
            details["trace"] = trace.take(event.tokens, self._texts.text)
        return details

    def _chunk(self, **fields: Any) -> bytes:
        options = self._body.stream_options
        chunk = self._head | {"object": self.chunk_kind}
        if options is not None and options.include_usage:
            chunk["usage"] = usage(self._run, self._emitted) if options.continuous_usage_stats else None
        return sse(b"".join(written(chunk | fields)))


def entries_of(one: Generation) -> list[tuple[int, TokenLogprobs]]:
    return list(zip(one.tokens, one.logprobs or (), strict=False))


def _list_of(parts: Seq[bytes]) -> Iterator[bytes]:
    """A list of JSON values from parts of it."""
    for place, part in enumerate(parts):
        yield b"," if place else b"["
        yield part
    yield b"]"


@dataclass
class Block:
    """A part of an answer that APIs show as one object: reasoning, text, or a call."""

    kind: Kind
    name: str
    id: str = field(default_factory=lambda: new_id(""))
    status: str = "in_progress"
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockWriter(Writer[B]):
    """Base of the writers of responses and messages: one answer, of blocks that begin, grow and end."""

    def __init__(self, service: Service, body: B, run: Run, box: Toolbox) -> None:
        super().__init__(service, body, run, box)
        self._answer = answer_to(service, box, run.request)
        self._blocks = list[Block]()
        self._open: tuple[str, int] | None = None  # kind and call of the last block

    @abstractmethod
    def _response(self, end: Generation) -> dict[str, Any]:
        """The response in one piece, of its blocks."""

    @abstractmethod
    def _begin(self) -> Iterator[bytes]:
        """The events before the first block."""

    @abstractmethod
    def _opened(self, block: Block) -> Iterator[bytes]:
        """The events that begin a block, which is the last one."""

    @abstractmethod
    def _added(self, block: Block, text: str) -> Iterator[bytes]:
        """The events that add to the last block."""

    @abstractmethod
    def _closed(self, block: Block) -> Iterator[bytes]:
        """The events that end the last block."""

    @abstractmethod
    def _finish(self, end: Generation) -> Iterator[bytes]:
        """The events that end the last block, and the response."""

    def _whole(self) -> dict[str, Any]:
        for event, _ in completed(self._run):
            for _ in self._written(event):  # the blocks are made with the events
                pass
        return self._response(self._run.generations[0])

    async def _events(self) -> AsyncIterator[bytes]:
        yield b"".join(self._begin())
        async for event in self._run.events():
            if found := b"".join(self._written(event)):
                yield found
        yield b"".join(self._finish(self._run.generations[0]))

    def _written(self, event: Event) -> Iterator[bytes]:
        """The events of what an answer says; one that says nothing has an empty text."""
        said = said_in(self._answer, event)
        if event.end is not None and not (said or self._blocks):
            said = [Said("text", "")]
        for piece in said:
            if self._open != (piece.kind, piece.call):
                if self._blocks:
                    yield from self._closed(self._blocks[-1])
                self._open = piece.kind, piece.call
                self._blocks.append(Block(piece.kind, piece.name or ""))
                yield from self._opened(self._blocks[-1])
            if piece.text:
                self._blocks[-1].parts.append(piece.text)
                yield from self._added(self._blocks[-1], piece.text)
