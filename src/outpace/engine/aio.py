"""Asyncio front of an engine: any task or thread adds requests, a dedicated thread decodes them."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from outpace.core import Generation, OutpaceError, SamplingParams, Source, TokenLogprobs
from outpace.engine.engine import Engine
from outpace.engine.guards import whole_number
from outpace.engine.handles import Add, Cancel, Handle, News, QueueFull, Stop, call_in, deliver_all, wake
from outpace.engine.reader import Reader
from outpace.engine.request import Prompt
from outpace.engine.works import Encoding, Score, Works
from outpace.sequence import Sequence


@dataclass(eq=False)
class _Running:
    """A request in the engine.

    Attributes:
        sent: number of tokens on their way to the handle, or there.
    """

    handle: weakref.ref[Handle]
    loop: asyncio.AbstractEventLoop
    sequence: Sequence
    reader: Reader
    sent: int = 0


class AsyncEngine:
    """An engine in a dedicated thread, for tasks of any event loop.

    A request's tokens are those of ``Engine``: they depend on its prompt, parameters and seed alone. Event
    loops are notified once per step, however many tokens it emitted. An interrupt in the dedicated thread
    ends all requests with an error, and those that follow are decoded; any other exception there that is not
    a request's own ends the engine.

    Args:
        make: an engine that no other thread uses, or a function that makes one, called in the new thread.
        max_waiting: maximum number of requests that wait to join the batch, at least 1; beyond it, ``add``
            raises ``QueueFull``, or waits.
        max_unread: number of tokens by which a reader may lag before its request is ended with an error; None
            for no limit. A slow reader does not slow other requests.
        on_failure: called in the engine's thread with the error that ended it.
        turn: a context of each step, and of what else computes, as a ``FairLock`` that several engines share:
            each then has an equal time. Loading a model beside a running engine needs it too, since
            transformers changes torch's default dtype for all threads while it makes a model.

    Raises:
        OutpaceError: an argument has the wrong type.
    """

    def __init__(
        self,
        make: Engine | Callable[[], Engine],
        *,
        max_waiting: int = 256,
        max_unread: int | None = None,
        on_failure: Callable[[BaseException], object] | None = None,
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        if not isinstance(make, Engine) and not callable(make):
            raise OutpaceError(f"AsyncEngine takes an Engine or a function that returns one, not {make!r}")
        self._made = make
        self._max_waiting = whole_number("max_waiting", max_waiting, 1)
        self._max_unread = None if max_unread is None else whole_number("max_unread", max_unread, 1)
        self._on_failure = on_failure
        self._turn = nullcontext() if turn is None else turn
        self._inbox: queue.SimpleQueue[Add | Cancel | Score | Stop] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next six
        # What has not ended, wherever it is: what an interrupt may lose on its way is found here.
        self._requests: dict[object, Add] = {}  # by their handles' keys, until their loops know of the end
        self._asked: dict[Score, None] = {}
        self._queue: set[object] = set()  # keys of accepted requests that have not joined the batch
        self._closed = False
        self._failed: BaseException | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._running: dict[object, _Running] = {}  # by their handle's key; the engine's thread only
        self._works = Works()  # the engine's thread only
        self._memory_use: float | None = None
        self._news: list[tuple[asyncio.AbstractEventLoop, News]] = []
        self._stop: Stop | None = None
        self._torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="outpace-engine", daemon=True)
        self._thread.start()

    # -- in any task -------------------------------------------------------------------------------------

    @property
    def failed(self) -> BaseException | None:
        """The error that ended the engine's thread, if any."""
        return self._failed

    @property
    def waiting(self) -> int:
        """Number of requests that have not joined the batch yet."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of requests in the batch."""
        return len([key for key in list(self._running) if key not in self._queue])

    @property
    def memory_use(self) -> float | None:
        """``Engine.memory_use`` after the latest step."""
        return self._memory_use

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, wait: bool = False, **more: Any
    ) -> Generation:
        """Add a request, as ``add`` does, and wait for its end.

        Raises:
            QueueFull, OutpaceError: as for ``add``. Exception: the error that ended the request.
        """
        return await (await self._add(prompt, params, wait, more, collects=True)).result()

    async def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        wait: bool = False,
        **more: Any,
    ) -> Handle:
        """Add a request, and return once the engine has accepted it.

        Args:
            wait: wait for room in the queue instead of raising ``QueueFull``.
            more: further arguments of ``Engine.add``.

        Raises:
            QueueFull: ``max_waiting`` requests are waiting. OutpaceError: the request is invalid, or the
            engine has been shut down or has failed.
        """
        return await self._add(prompt, params, wait, more)

    async def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        wait: bool,
        more: dict[str, Any],
        collects: bool = False,
    ) -> Handle:
        loop = asyncio.get_running_loop()
        handle = Handle(self._inbox, loop, collects)
        arguments = {"prompt": prompt, "params": params, **more}
        request = Add(weakref.ref(handle), handle._key, loop, arguments)
        while (room := self._let_in(request, loop, wait)) is not None:
            await room
        try:
            await handle._accepted
        except asyncio.CancelledError:
            handle.cancel()
            raise
        return handle

    def _let_in(
        self, request: Add, loop: asyncio.AbstractEventLoop, wait: bool
    ) -> asyncio.Future[None] | None:
        """Put a request into the inbox; if the queue is full, return a future to wait for."""
        with self._lock:
            self._check_open()
            if len(self._queue) < self._max_waiting:
                self._requests[request.key] = request
                self._queue.add(request.key)
                self._inbox.put(request)
                return None
            if not wait:
                raise QueueFull(
                    f"{len(self._queue)} requests are waiting; try again later, or add(wait=True)"
                )
            room: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, room))
            return room

    async def score(self, tokens: Seq[int], top: int = 0, client: str = "") -> list[TokenLogprobs]:
        """Log probabilities of a text's tokens after the first: ``Engine.score``, in chunks between steps.

        Args:
            client: whose text it is: clients take turns.

        Raises:
            OutpaceError: as for ``Engine.score``, or the engine has been shut down or has failed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[TokenLogprobs]] = loop.create_future()

        def settle(found: list[TokenLogprobs] | Exception) -> None:
            if future.done():  # cancelled
                return
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

        def deliver(found: list[TokenLogprobs] | Exception) -> None:
            call_in(loop, settle, found)
            self._asked.pop(score, None)

        score = Score(deliver, future.cancelled, tokens, top, client)
        with self._lock:
            self._check_open()
            self._asked[score] = None
            self._inbox.put(score)
        return await future

    def _check_open(self) -> None:
        if self._failed is not None:
            raise OutpaceError("the engine has failed; make a new one") from self._failed
        if self._closed:
            raise OutpaceError("the engine is being shut down and accepts no more requests")

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Refuse new requests, finish or remove the accepted ones, and end the thread.

        Args:
            drain: decode accepted requests to their end; False removes them.
            timeout: seconds after which draining ends and the remaining requests are removed.
        """
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, []
        wake(waiters)
        self._inbox.put(Stop(drain))
        await asyncio.to_thread(self._thread.join, timeout)
        if self._thread.is_alive():
            self._inbox.put(Stop(drain=False))
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        await self.shutdown(drain=kind is None)

    # -- in the engine's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)  # OpenMP counts them per thread
        try:
            with self._turn:
                engine = self._made if isinstance(self._made, Engine) else self._made()
                engine.warm()
            while not self._served(engine):
                pass
        except BaseException as error:
            self._die(error)
            if not isinstance(error, Exception):
                raise

    def _served(self, engine: Engine) -> bool:
        """Serve until the engine is shut down; return False after an interrupt, which ends all requests."""
        try:
            while self._serve(engine):
                pass
            return True
        except KeyboardInterrupt:
            for sequence in engine.sequences:
                engine.remove(sequence)
            self._end(OutpaceError("the engine was interrupted, which ended all requests; send it again"))
            if self._closed and self._stop is None:  # the message may be lost
                self._stop = Stop(drain=False)
            return False

    def _serve(self, engine: Engine) -> bool:
        """Handle the messages that have arrived, and run one step; return False once shut down and done."""
        idle = not self._running and not self._works and self._stop is None
        while idle or not self._inbox.empty():
            self._take(engine, self._inbox.get())
            idle = False
        self._publish()  # report accepted requests before a step, which may take long
        if self._stop is not None and not self._stop.drain:
            for key in list(self._running):
                self._remove(engine, key)
            self._works.end(OutpaceError("the engine was shut down"))
        if self._running or self._works:
            with self._turn:
                self._compute(engine)
        self._publish()
        return bool(self._running or self._works) or self._stop is None

    def _compute(self, engine: Engine) -> None:
        """Run one step, and a piece of what else is to be done."""
        if self._running:
            engine.step()
            self._memory_use = engine.memory_use
            for key, running in list(self._running.items()):
                self._report(engine, key, running)
        self._works.advance(engine)

    def _take(self, engine: Engine, message: Add | Cancel | Score | Stop) -> None:
        if isinstance(message, Stop):
            self._stop = message
        elif isinstance(message, Score):
            if message in self._asked:
                self._works.add(message)
        elif isinstance(message, Cancel):
            if message.key in self._running:
                self._remove(engine, message.key)
            else:
                self._leave_queue(message.key)
                self._requests.pop(message.key, None)
        elif message.key in self._requests:
            source = message.arguments.get("source")
            if source is None or isinstance(source, Source):
                with self._turn:
                    self._add_to(engine, message)
            else:
                self._works.add(self._encoding(engine, message, source))

    def _encoding(self, engine: Engine, message: Add, source: Any) -> Encoding:
        """The source of a request as work between steps, after which the request is added."""

        def answer(found: Any) -> None:
            if isinstance(found, Exception):
                self._refuse(message, found)
            else:
                self._add_to(engine, replace(message, arguments={**message.arguments, "source": found}))

        def cancelled() -> bool:
            return message.key not in self._requests

        return Encoding(answer, cancelled, source, message.arguments.get("client", ""))

    def _add_to(self, engine: Engine, message: Add) -> None:
        try:
            sequence = engine.add(**message.arguments)
        except Exception as error:
            self._refuse(message, error)
            return
        self._running[message.key] = _Running(message.handle, message.loop, sequence, Reader(sequence))
        self._news.append((message.loop, News(message.handle, message.key)))

    def _refuse(self, message: Add, error: Exception) -> None:
        self._leave_queue(message.key)
        self._news.append((message.loop, News(message.handle, message.key, error=error, refusal=error)))

    def _remove(self, engine: Engine, key: object) -> None:
        engine.remove(self._running[key].sequence)
        self._report(engine, key, self._running[key])

    def _report(self, engine: Engine, key: object, running: _Running) -> None:
        """Collect the news of a request, and drop it if it has ended."""
        sequence, news = running.sequence, News(running.handle, key)
        try:
            news.tokens = running.reader.new()
            if sequence.finish_reason is not None:
                news.generation, news.error = sequence.generation(), sequence.error
        except Exception as error:  # the tokenizer's
            engine.remove(sequence)
            news.error = error
        handle = running.handle()
        running.sent += len(news.tokens)
        if handle is None or self._lags(handle, running.sent):
            engine.remove(sequence)
            news.error = OutpaceError(
                f"more than {self._max_unread} tokens were left unread; read them faster, or raise max_unread"
            )
        ended = sequence.finish_reason is not None or news.error is not None
        if key in self._queue and (sequence.place is not None or ended):
            self._leave_queue(key)
            news.joined = True
        if ended:
            del self._running[key]
        if news.tokens or news.joined or ended:
            self._news.append((running.loop, news))

    def _lags(self, handle: Handle, sent: int) -> bool:
        """True if too many of the tokens sent to a handle are unread, or not delivered to it yet."""
        most = self._max_unread
        if most is None or handle._collects:
            return False
        return sent - handle._delivered + len(handle._unread) > most

    def _leave_queue(self, key: object) -> None:
        with self._lock:
            self._queue.discard(key)
            waiters, self._waiters = self._waiters, []  # wake all, since one may have been cancelled
        wake(waiters)

    def _publish(self) -> None:
        """Pass the news to the event loops, once per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[News]] = {}
        for loop, news in self._news:
            by_loop.setdefault(loop, []).append(news)
        for loop, all_news in by_loop.items():
            call_in(loop, deliver_all, all_news)
            for news in all_news:
                if news.ends:
                    self._requests.pop(news.key, None)
        self._news = []

    def _end(self, cause: Exception, close: bool = True) -> None:
        """End whatever has not ended with an error, also what is still on its way to the engine."""
        with self._lock:
            requests, self._requests = self._requests, {}
            asked, self._asked = list(self._asked), {}
            self._queue.clear()
            waiters, self._waiters = self._waiters, []
        wake(waiters)
        self._running.clear()
        self._news = [
            (request.loop, News(request.handle, key, error=cause, refusal=cause))
            for key, request in requests.items()
        ]
        self._publish()
        self._works.end(cause, close)
        for score in asked:
            score.answer(cause)

    def _die(self, error: BaseException) -> None:
        """End every request with an error."""
        cause = error if isinstance(error, Exception) else OutpaceError(f"the engine has failed: {error!r}")
        self._failed = error
        self._end(cause, close=False)
        if self._on_failure is not None:
            self._on_failure(error)
