"""The engine as a service: admission, tokenisation, decoding, metrics and shutdown."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
from transformers import MinNewTokensLengthLogitsProcessor

from outpace._version import __version__
from outpace.core import Generation, OutpaceError, SamplingParams, StreamedToken
from outpace.drafters.base import Drafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.reference import Reference
from outpace.drafters.none import NoDraft
from outpace.engine.aio import AsyncEngine, Handle
from outpace.engine.engine import Engine
from outpace.engine.parts import drafter_of
from outpace.loading import Loaded
from outpace.serve.ask import Ask, Defaults
from outpace.serve.errors import Refused, later, refusal
from outpace.serve.grammar import Forced, Grammar, Grammars
from outpace.serve.metrics import Metrics
from outpace.serve.trace import Trace, Traced, Tracer

T = TypeVar("T")
BROUGHT = "request"  # the drafter for a request's prediction or grammar
_RECENT = 64  # number of recent ends of choices from which the rate is measured


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        running: maximum number of sequences decoded at once.
        waiting: maximum number of further choices that wait; beyond it, requests are refused with 429.
        wait: maximum seconds that a choice waits to join the batch.
        unread: maximum number of tokens by which a client may lag.
        body: maximum bytes of a request's body.
        ping: seconds between pings in a silent stream.
        send: maximum seconds for a client to accept a chunk.
    """

    running: int = 32
    waiting: int = 256
    wait: float = 60.0
    unread: int = 4096
    body: int = 4 * 2**20
    ping: float = 15.0
    send: float = 30.0


def with_brought(drafter: Drafter[Any]) -> Drafter[Any]:
    """A server's drafter, combined with those for a request's prediction or grammar."""
    parts: list[Drafter[Any]] = [] if drafter.reads_references else [Reference(prompt=False)]
    parts.append(Forced())
    if not isinstance(drafter, NoDraft):
        parts += drafter.parts if isinstance(drafter, Combined) else [drafter]
    return Combined(tuple(parts))


def make_engine(
    model: Loaded,
    drafter: Drafter[Any] | str | None,
    limits: Limits,
    others: Mapping[str, str] | None = None,
    **more: Any,
) -> Engine:
    """Make an engine for a service.

    Args:
        others: spec strings of further drafters, by the names that requests use.
        more: further arguments of ``Engine``.

    Raises:
        OutpaceError: the parts do not fit together.
    """
    own = drafter_of(drafter)
    drafters: dict[str, Drafter[Any] | str] = dict(others or {})
    if BROUGHT in drafters:
        raise OutpaceError(f"{BROUGHT!r} names the drafter of predictions; choose another name")
    if type(own).attach is Drafter.attach:  # a drafter that replaces the target cannot be combined
        drafters[BROUGHT] = with_brought(own)
    return model.engine(own, max_running=limits.running, drafters=drafters, observer=Tracer(), **more)


@dataclass
class Event:
    """Result of a step for one choice.

    Attributes:
        index: index of the choice.
        end: the complete generation, in the choice's last event.
    """

    index: int
    tokens: list[StreamedToken]
    end: Generation | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class Ticket:
    """Reserved room for choices, from before their prompts are tokenised until they have ended."""

    def __init__(self, service: Service, choices: int) -> None:
        self._service = service
        self._choices = choices

    def close(self) -> None:
        """Release the room; repeated calls have no effect."""
        self._service.leave(self._choices)
        self._choices = 0


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
        used: the name of the drafter.
    """

    service: Service
    ticket: Ticket
    ask: Ask = field(init=False)
    choices: list[Choice] = field(default_factory=list)
    used: str = "off"
    ended: dict[int, Generation] = field(default_factory=dict)

    @property
    def generations(self) -> list[Generation]:
        """The choices that have ended, ordered by index."""
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

    def close(self) -> None:
        """Cancel unfinished choices, and release the room."""
        for choice in self.choices:
            choice.handle.cancel()
        self.ticket.close()

    async def _read(self, choice: Choice) -> AsyncIterator[Event]:
        metrics, clock = self.service.metrics, self.service.clock
        await self.service.join(choice)
        while True:
            try:
                tokens = await choice.handle.read()
                end = await choice.handle.result() if choice.handle.ended else None
            except Exception as error:
                raise refusal(self.service.engine.failed or error) from error
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
            self.service.finished()
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


class Service:
    """A loaded model behind an ``AsyncEngine``; made in the event loop that it serves.

    Args:
        model: the model, its tokenizer and template.
        engine: an engine made by ``make_engine``.
        names: names of the model in requests; the first one is used in logs and metrics.
        clock: function that returns the time in seconds.
        on_failure: called in the event loop when the engine's thread has died.
    """

    def __init__(
        self,
        model: Loaded,
        engine: Engine,
        limits: Limits,
        names: Seq[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[], object] | None = None,
    ) -> None:
        self.model, self.names, self.limits, self.clock = model, tuple(names), limits, clock
        self.defaults = Defaults.of(model.target)
        self.grammars = Grammars(model.tokenizer, model.target.vocabulary, model.target.eos_token_ids)
        self.now = time.time
        self.created = int(self.now())
        self.fingerprint = f"outpace-{__version__}-{model.dtype}"
        self.draining = False
        own = "off" if isinstance(engine.drafter, NoDraft) else engine.drafter.name
        self._drafters: dict[str | None, str] = {None: own, "off": "off"}
        self._drafters |= {name: name for name in engine.drafter_names}
        self._longest = max(map(len, model.tokenizer.get_vocab()), default=1)  # characters of a token
        loop = asyncio.get_running_loop()

        def failed(error: BaseException) -> None:
            if on_failure is not None:
                loop.call_soon_threadsafe(on_failure)

        choices = limits.running + limits.waiting
        self.engine = AsyncEngine(engine, max_waiting=choices, max_unread=limits.unread, on_failure=failed)
        self._inside = 0  # choices that hold a ticket
        self._empty = asyncio.Event()
        self._empty.set()
        self._ends: deque[float] = deque(maxlen=_RECENT)
        self.metrics = Metrics(
            self.name,
            lambda: self.engine.running,
            lambda: max(0, self._inside - self.engine.running),
            lambda: self.engine.memory_use or 0.0,
        )

    @property
    def name(self) -> str:
        """The model's name, if a request gives none."""
        return self.names[0]

    @property
    def drafters(self) -> list[str]:
        """The names of drafters for requests; the first is the default."""
        return [name for name in dict.fromkeys(self._drafters.values()) if name != BROUGHT]

    # -- admission ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that requests can still be decoded.

        Raises:
            Refused: the engine has died, or the server is shutting down.
        """
        if self.engine.failed is not None:
            raise Refused(503, "the engine has failed; restart the server", code="engine_failed")
        if self.draining:
            raise later(503, "the server is shutting down; ask another one", "draining", 1)

    def admit(self, choices: int) -> Ticket:
        """Reserve room for choices.

        Raises:
            Refused: there is no room, the engine has died, or the server is shutting down.
        """
        self.check()
        most = self.limits.running + self.limits.waiting
        if choices > most:
            raise Refused(400, f"{choices} choices are more than the {most} that there is room for", "n")
        if self._inside + choices > most:
            self.metrics.refused("overload")
            message = f"the server is full: {self._inside} of {most} choices are running or waiting"
            raise later(429, message, "overloaded", self._seconds_for(choices))
        self._inside += choices
        self._empty.clear()
        return Ticket(self, choices)

    def leave(self, choices: int) -> None:
        """Release the room of a ticket."""
        self._inside -= choices
        if not self._inside:
            self._empty.set()

    def finished(self) -> None:
        """Record the end of a choice, for the rate."""
        self._ends.append(self.clock())

    def _seconds_for(self, choices: int) -> float:
        """Estimated seconds until this number of choices has ended, at the recent rate."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(self._ends[-1] - self._ends[0], 1e-3)
        return min(choices / rate, 60)

    # -- reading -----------------------------------------------------------------------------------------

    def tokens(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; one that cannot fit into the context is refused before it is tokenised.

        Args:
            special: add the special tokens that begin or end a text.

        Raises:
            Refused: the text is too long. OutpaceError: it contains an unpaired surrogate.
        """
        context = self.defaults.context
        if context is not None and len(text) > context * self._longest:
            raise Refused(
                400,
                f"this model's maximum context length is {context} tokens, and a text of {len(text)} "
                "characters has more; shorten it",
                code="context_length_exceeded",
            )
        return self.model.tokens(text) if special else self.model.plain_tokens(text)

    def beginning(self) -> list[int]:
        """The prompt for a request without one: the token that begins texts, or the one that ends them.

        Raises:
            Refused: the model has neither.
        """
        tokenizer = self.model.tokenizer
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token is not None:
                return [int(token)]
        raise Refused(400, f"{self.name} has no token that begins a text; give a prompt", "prompt")

    def conversation(self, messages: Seq[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to the beginning of the answer.

        Raises:
            Refused: there is no template, or it rejects the messages, or they are too long.
        """
        if not self.model.has_template:
            raise Refused(400, f"{self.name} has no chat template; use /v1/completions", "messages")
        return self.tokens(self.model.render(messages, **options), special=False)

    def check_tokens(self, tokens: Seq[int]) -> list[int]:
        """Check token ids sent by a client.

        Raises:
            Refused: one is outside the model's vocabulary.
        """
        most = self.model.target.vocabulary
        if any(token >= most for token in tokens):
            raise Refused(400, f"token ids are below {most}", "prompt")
        return list(tokens)

    # -- decoding ----------------------------------------------------------------------------------------

    async def start(self, choices: int, prepare: Callable[[], Ask]) -> Run:
        """Admit a request, and wait until it has joined the batch.

        Args:
            prepare: makes the request; called in a thread, since tokenising takes time.

        Raises:
            Refused: the request is invalid, there is no room, or it has waited too long.
        """
        run = Run(self, self.admit(choices))
        try:
            try:
                run.ask = await asyncio.to_thread(prepare)
            except Exception as error:
                raise refusal(error) from error
            await self._start(run, run.ask)
            await self.join(run.choices[0])
        except BaseException:
            run.close()
            raise
        return run

    async def join(self, choice: Choice) -> None:
        """Wait until a choice has joined the batch.

        Raises:
            Refused: it has waited too long.
        """
        try:
            with anyio.fail_after(max(0.0, choice.began + self.limits.wait - self.clock())):
                await choice.handle.joined()
        except TimeoutError:
            self.metrics.refused("wait")
            message = f"the request has waited for more than {self.limits.wait:g} s; try again later"
            raise later(503, message, "waited_too_long", self._seconds_for(1)) from None
        if choice.joined is None:
            choice.joined = self.clock()
            self.metrics.queued.observe(choice.joined - choice.began)

    async def _start(self, run: Run, ask: Ask) -> None:
        matcher = None if ask.schema is None else await self.grammars.compile(ask.schema)
        name = self._drafter(ask)
        run.used = self._drafters[name]
        references = [ask.prediction] if ask.prediction and name != "off" else []
        for index in range(len(ask.prompts) * ask.n):
            prompt, began = ask.prompts[index // ask.n], self.clock()
            params = ask.choice(index)
            drafts = params.drafts
            params = replace(
                params, speculation=replace(drafts, drafter=name, memory=drafts.memory or ask.salt)
            )
            criteria = None
            if ask.min_tokens:
                params = replace(params, logits_processors=[self._at_least(ask, len(prompt), params)])
            if matcher is not None:
                grammar = Grammar(matcher, len(prompt))
                params = replace(params, logits_processors=[grammar])
                criteria = grammar.ended
            trace = Trace(run.used) if ask.trace else None
            if trace is not None:
                params = Traced.of(params, trace)
            try:
                handle = await self.engine.add(
                    prompt, params, criteria=criteria, references=references, salt=ask.salt
                )
            except Exception as error:
                raise refusal(self.engine.failed or error) from error
            run.choices.append(Choice(index, prompt, handle, run.used, began, trace))

    def _drafter(self, ask: Ask) -> str | None:
        """The engine's name of the drafter for a request.

        Raises:
            Refused: there is no drafter of this name.
        """
        name = ask.params.drafts.drafter
        if name == self._drafters[None] and name != "off":
            name = None
        if name not in self._drafters or name == BROUGHT:
            known = ", ".join(map(repr, self.drafters))
            raise Refused(400, f"this server has no drafter {name!r}; it has {known}", "speculation")
        brings = bool(ask.prediction) or ask.schema is not None
        return BROUGHT if name is None and brings and BROUGHT in self._drafters else name

    def _at_least(self, ask: Ask, prompt: int, params: SamplingParams) -> MinNewTokensLengthLogitsProcessor:
        ends = sorted({*params.stop_token_ids, *self.model.target.eos_token_ids})
        return MinNewTokensLengthLogitsProcessor(prompt, ask.min_tokens, ends, device=self.model.device)

    # -- ending ------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish, and end the rest after this many seconds."""
        self.draining = True
        with anyio.move_on_after(seconds):
            await self._empty.wait()
        await self.engine.shutdown(drain=False)
