"""A request in flight: its choices in the engine, from joining the batch to their last tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from outpace.core import Generation, StreamedToken
from outpace.engine.aio import AsyncEngine
from outpace.engine.handles import Handle
from outpace.loading import Loaded
from outpace.serve.admission import Admission, Ticket
from outpace.serve.errors import Refused, refusal
from outpace.serve.metrics import Metrics
from outpace.serve.request import ParsedRequest
from outpace.serve.trace import Trace

T = TypeVar("T")


@dataclass
class Event:
    """Result of a step for one choice.

    Attributes:
        index: index of the choice.
        end: the complete generation, in the choice's last event. Its ``finish_reason`` is "eos", "stop" or
            "length".
    """

    index: int
    tokens: list[StreamedToken]
    end: Generation | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(eq=False)
class Choice:
    """One sequence of a run.

    Attributes:
        trace: its steps, if requested.
        began, joined, latest: times of the request, of joining the batch and of the latest tokens, in seconds
            of the clock.
    """

    index: int
    prompt: Seq[int]
    handle: Handle
    drafter: str
    began: float
    trace: Trace | None = None
    joined: float | None = None
    latest: float | None = None


@dataclass(eq=False)
class Run:
    """The choices of one request in the engine: read ``events``, or await ``finish``.

    Attributes:
        model: the model, with its tokenizer.
        ticket: the room that it occupies.
        used: the name of the drafter.
    """

    engine: AsyncEngine
    model: Loaded
    metrics: Metrics
    admission: Admission
    ticket: Ticket
    request: ParsedRequest = field(init=False)
    choices: list[Choice] = field(default_factory=list)
    used: str = "off"
    ended: dict[int, Generation] = field(default_factory=dict)

    @property
    def generations(self) -> list[Generation]:
        return [self.ended[index] for index in sorted(self.ended)]

    async def events(self) -> AsyncIterator[Event]:
        """Yield the result of each step; closing the iterator cancels the unfinished choices.

        Raises:
            Refused: a choice failed.
        """
        try:
            async for event in merged([self._read(choice) for choice in self.choices]):
                yield event
        finally:
            self.close()

    async def finish(self) -> list[Generation]:
        """Wait until all choices have ended, and return them.

        Raises:
            Refused: a choice failed.
        """
        async for _ in self.events():
            pass
        return self.generations

    async def join(self, choice: Choice) -> None:
        """Wait until a choice has joined the batch.

        Raises:
            Refused: it has waited too long.
        """
        try:
            with anyio.fail_after(self.admission.seconds_left(choice.began)):
                await choice.handle.joined()
        except TimeoutError:
            raise self.admission.waited_too_long() from None
        if choice.joined is None:
            choice.joined = self.admission.clock()
            self.metrics.queued.observe(choice.joined - choice.began)

    def close(self) -> None:
        """Cancel unfinished choices, and release the room."""
        for choice in self.choices:
            choice.handle.cancel()
        self.ticket.close()

    async def _read(self, choice: Choice) -> AsyncIterator[Event]:
        metrics, clock = self.metrics, self.admission.clock
        await self.join(choice)
        while True:
            try:
                tokens = await choice.handle.read()
                end = await choice.handle.result() if choice.handle.ended else None
            except Exception as error:
                raise refusal(self.engine.failed or error) from error
            now = clock()
            if tokens and choice.latest is None:
                metrics.first_token.observe(now - choice.began)
            elif tokens and choice.latest is not None:
                for _ in tokens:
                    metrics.between.observe((now - choice.latest) / len(tokens))
            if tokens:
                choice.latest = now
            if end is None:
                yield Event(choice.index, tokens)
                continue
            metrics.whole.observe(now - choice.began)
            metrics.ended(len(choice.prompt), end, choice.drafter)
            if end.finish_reason == "removed":
                raise Refused(503, "the server has ended the request: it is shutting down", code="removed")
            self.ended[choice.index] = end
            self.admission.finished()
            yield Event(choice.index, tokens, end)
            return


async def merged(sources: Seq[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Merge several iterators; at most one item of each is read ahead."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield item
        return
    pending = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        for task in pending:
            task.cancel()
