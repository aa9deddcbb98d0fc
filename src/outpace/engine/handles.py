"""A request of an ``AsyncEngine`` as its task sees it, and the messages to and from the engine's thread."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace.core import Generation, OutpaceError, StreamedToken


class QueueFull(OutpaceError):
    """The queue of waiting requests is full (``max_waiting``)."""


class Handle:
    """One request: an async iterator of its tokens, read by one task.

    Dropping the last reference to a handle, or cancelling the task that awaits it, cancels the request.
    """

    # For the destructor of a handle whose construction was interrupted.
    _key: object = None
    _generation: Generation | None = None
    _error: Exception | None = None

    def __init__(
        self, inbox: queue.SimpleQueue[Any], loop: asyncio.AbstractEventLoop, collects: bool
    ) -> None:
        self._inbox = inbox
        self._key = object()  # used in the engine's thread, which must not keep the handle alive
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._joined = asyncio.Event()
        self._unread: deque[StreamedToken] = deque()
        self._delivered = 0  # number of tokens, read ones included
        self._collects = collects  # only the result is read, so `max_unread` does not apply
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """True if the request has ended; tokens may still be unread."""
        return self._generation is not None or self._error is not None

    def cancel(self) -> None:
        """End the request; its slot is free by the next step. No effect on a request that has ended."""
        self._inbox.put(Cancel(self._key))

    async def joined(self) -> None:
        """Wait until the request is in the batch, or has ended."""
        await self._joined.wait()

    async def result(self) -> Generation:
        """Wait for the end; a cancelled request has the ``finish_reason`` ``"removed"``.

        Raises:
            Exception: the error that ended the request.
        """
        self._collects = True
        while not self.ended:
            await self._change()
        if self._error is not None:
            raise self._error
        assert self._generation is not None
        return self._generation

    def __aiter__(self) -> Handle:
        return self

    async def __anext__(self) -> StreamedToken:
        if not self._unread:
            self._unread.extend(await self.read())
        if not self._unread:
            raise StopAsyncIteration
        return self._unread.popleft()

    async def read(self) -> list[StreamedToken]:
        """Wait for new tokens and return all since the last call; an empty list once the request has ended.

        Raises:
            Exception: the error that ended the request, once its tokens have been read.
        """
        while not self._unread and not self.ended:
            await self._change()
        if not self._unread and self._error is not None:
            raise self._error
        tokens = list(self._unread)
        self._unread.clear()
        return tokens

    async def _change(self) -> None:
        self._changed.clear()
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def deliver(self, news: News) -> None:
        """Take the results of a step; called in the event loop."""
        self._delivered += len(news.tokens)
        self._unread.extend(news.tokens)
        if news.joined or news.ends:
            self._joined.set()
        if not self.ended:
            self._generation, self._error = news.generation, news.error
        if not self._accepted.done():
            if news.refusal is None:
                self._accepted.set_result(None)
            else:
                self._accepted.set_exception(news.refusal)
        self._changed.set()

    def __del__(self) -> None:
        if self._key is not None and not self.ended:
            self.cancel()  # SimpleQueue.put may be called from a destructor


@dataclass(frozen=True)
class Add:
    """A request on its way to the engine's thread; ``arguments`` are those of ``Engine.add``."""

    handle: weakref.ref[Handle]
    key: object
    loop: asyncio.AbstractEventLoop
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Cancel:
    key: object


@dataclass(frozen=True)
class Stop:
    drain: bool


@dataclass
class News:
    """Results of a step for one handle."""

    handle: weakref.ref[Handle]
    key: object
    joined: bool = False
    tokens: list[StreamedToken] = field(default_factory=list)
    generation: Generation | None = None
    error: Exception | None = None
    refusal: BaseException | None = None

    @property
    def ends(self) -> bool:
        return self.generation is not None or self.error is not None


def deliver_all(all_news: Seq[News]) -> None:
    for news in all_news:
        handle = news.handle()
        if handle is not None:
            handle.deliver(news)


def wake(waiters: Seq[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]) -> None:
    for loop, future in waiters:
        call_in(loop, _set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
    """Run a function in an event loop; a closed loop is ignored, since it has no readers."""
    if not loop.is_closed():
        try:
            loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            if not loop.is_closed():
                raise
