"""The engine as a service: requests are admitted and started, its health is checked, and it is shut down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import anyio

from outpace._version import __version__
from outpace.core import OutpaceError
from outpace.engine.aio import AsyncEngine
from outpace.engine.engine import Engine
from outpace.engine.slow import reasons
from outpace.loading import Loaded
from outpace.serve.admission import Admission, Limits, Ticket
from outpace.serve.dialogue import Dialogue
from outpace.serve.engine import Drafters
from outpace.serve.errors import Refused, later, refusal, unknown_model, unreadable
from outpace.serve.grammar import Grammars
from outpace.serve.images import Images
from outpace.serve.metrics import Metrics
from outpace.serve.pool import JobLimit, spare
from outpace.serve.request import Defaults, ParsedRequest
from outpace.serve.run import Choice, Run
from outpace.serve.texts import Prompts, Texts
from outpace.serve.thinking import Budget
from outpace.serve.totals import CLIENT, Total, Turns
from outpace.serve.trace import Trace, Traced

T = TypeVar("T")
_log = logging.getLogger("outpace.serve")
_PATIENCE = 0.25  # seconds for which a question about health waits for the engine


class Service:
    """A loaded model behind an ``AsyncEngine``; made in the event loop that it serves.

    Args:
        model: the model, its tokenizer and template.
        engine: an engine made by ``make_engine``.
        names: names of the model in requests; the first one is used in logs and metrics.
        clock: function that returns the time in seconds.
        on_failure: called in the event loop when the engine's thread has died.
        store: the folder that keeps the prefix cache from one process to the next; None for none.
        metrics: those of earlier services of this model, which this one continues.
        total: the choices of all models in this process; None if this is the only one.
        turn: a context of each step; see ``AsyncEngine``.
        jobs: the places for jobs of processes, of all models in this process; None if this is the only one.
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
        store: Path | None = None,
        metrics: Metrics | None = None,
        total: Total | None = None,
        turn: AbstractContextManager[object] | None = None,
        jobs: Turns | None = None,
    ) -> None:
        self.model, self.names = model, tuple(names)
        self.defaults = Defaults.of(model.target, limits.cut)
        self.dialogue = Dialogue(model)
        target, memory, turns = model.target, max(2**30, 256 * limits.body), jobs or Turns(spare())
        marks = self.dialogue.tokens.values()
        self.grammars = Grammars(model.tokenizer, target.vocabulary, target.eos_token_ids, turns, marks)
        self.texts = Texts(model, JobLimit(limits.read, memory), turns)
        self.images = Images(model, self.dialogue, self.name, limits.read, turns)
        self.prompts = Prompts(model, self.texts, self.images, self.name)
        self._probe: asyncio.Future[None] | None = None
        self._probed = 0.0
        self._working: set[asyncio.Future[Any]] = set()
        self.now = time.time
        self.created = int(self.now())
        self.fingerprint = f"outpace-{__version__}-{model.dtype}"
        self.exactness = exactness(engine)
        self.slow = reasons(engine.target, engine.drafter, engine.governor, engine.verifier)
        self.draining = False
        self.drafters = Drafters(engine)
        self.prefixes = engine.prefix_bytes, engine.prefix_rows
        loop = asyncio.get_running_loop()

        def failed(error: BaseException) -> None:
            if on_failure is not None:
                loop.call_soon_threadsafe(on_failure)

        self._own, self._store = engine, store
        self.engine = AsyncEngine(
            self._restored,
            max_waiting=2 * limits.choices + 8,
            max_unread=limits.unread,
            on_failure=failed,
            turn=turn,
        )
        self.metrics = metrics or Metrics(
            self.name,
            lambda: self.engine.running,
            lambda: max(0, self.admission.inside - self.engine.running),
            lambda: self.engine.memory_use or 0.0,
        )
        self.admission = Admission(limits, self.metrics, clock, total)

    def _restored(self) -> Engine:
        """The engine with the stored prefix cache, which has read an image; runs in the engine's thread."""
        if self._store is not None:
            try:
                self._own.load_prefixes(self._store)
            except OutpaceError as error:
                _log.warning("prompts that were stored are not used: %s", error)
        self.images.warm()
        return self._own

    @property
    def name(self) -> str:
        """The model's name, if a request gives none."""
        return self.names[0]

    @cached_property
    def capabilities(self) -> dict[str, Any]:
        """What the model does here.

        ``tools`` says where a prompt has them: in the template's own place, in a preamble, or nowhere.
        """
        template, target = self.model.has_template, self.model.target
        shown = ("template" if self.dialogue.abilities.tools else "preamble") if template else None
        return {
            "context": self.defaults.context,
            "tools": shown,
            "reasoning": template and self.dialogue.thinks,
            "images": self.images.taken,
            "infill": self.prompts.fills is not None,
            "drafters": self.drafters.names,
            "exact": "exactness" not in self.exactness,
            "promise": target.promise,
        }

    # -- as the only model of a server -------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, model: str | None) -> AsyncIterator[Service]:
        """The service of a request that names this model; see ``Host``."""
        if model is not None and model not in self.names:
            raise unknown_model(model, self.names)
        yield self

    def cards(self) -> list[dict[str, Any]]:
        """The model as ``/v1/models`` lists it, once by each of its names."""
        card = {
            "object": "model",
            "created": self.created,
            "owned_by": "outpace",
            "max_model_len": self.defaults.context,
            "drafters": self.drafters.names,
            "chat": self.model.has_template,
            "capabilities": self.capabilities,
            "max_running": self.admission.limits.running,
        }
        return [{"id": name, **card} for name in self.names]

    async def health(self) -> dict[str, Any]:
        """What ``/health`` says, besides that the server is well."""
        await self.check_health()
        return {"slow": self.slow} if self.slow else {}

    async def unload(self, model: str) -> None:
        """Refuse to unload the only model."""
        raise Refused(400, f"{model} is the server's only model, and stays loaded; end the server instead")

    # -- admission ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that requests can still be decoded.

        Raises:
            Refused: the engine has died, or the server is shutting down.
        """
        if self.engine.failed is not None:
            raise Refused(503, "the engine has failed; restart the server", code="engine_failed")
        if self.draining:
            raise later(503, "the server is shutting down; use another one", "draining", 1)

    async def check_health(self) -> None:
        """Check that a request of the server's own passes through the engine's thread in time.

        It has no prompt, so that the engine refuses it, between two steps, and it waits for no slot.

        Raises:
            Refused: the engine has died, or has not answered for ``Limits.stuck`` seconds.
        """
        if self.engine.failed is not None:
            raise Refused(503, "the engine has failed; restart the server", code="engine_failed")
        if self._probe is None or self._probe.done():
            self._probed = self.admission.clock()
            self._probe = asyncio.ensure_future(self._asked())
        await asyncio.wait({self._probe}, timeout=_PATIENCE)
        waited, most = self.admission.clock() - self._probed, self.admission.limits.stuck
        if not self._probe.done() and waited > most:
            message = f"the engine has not answered for {waited:.0f} s; restart the server"
            raise Refused(503, message, code="engine_stuck")

    async def _asked(self) -> None:
        with suppress(OutpaceError):
            await self.engine.add([])

    def admit(self, choices: int) -> Ticket:
        """Reserve room for choices.

        Raises:
            Refused: there is no room, the engine has died, or the server is shutting down.
        """
        self.check()
        return self.admission.admit(choices)

    # -- decoding ----------------------------------------------------------------------------------------

    async def work(self, work: Callable[[], Awaitable[T]], ticket: Ticket | None = None) -> T:
        """The result of work on a client's text, which has room until it ends, though the client leave.

        Args:
            ticket: its room; None for that of one choice.

        Raises:
            Refused: there is no room, or the text cannot be used.
        """
        room = self.admit(1) if ticket is None else ticket
        task = asyncio.ensure_future(work())
        self._working.add(task)
        task.add_done_callback(self._worked)
        room.hold(task)
        try:
            return await asyncio.shield(task)
        except Exception as error:
            raise unreadable(error) from error
        finally:
            if ticket is None:
                room.close()

    def _worked(self, task: asyncio.Future[Any]) -> None:
        self._working.discard(task)
        if not task.cancelled():
            task.exception()  # of which nobody may be left to be told

    async def start(self, choices: int, parse: Callable[[], Awaitable[ParsedRequest]]) -> Run:
        """Admit a request, parse it, and wait until it has joined the batch.

        Args:
            parse: parses the request; called once there is room for its choices.

        Raises:
            Refused: the request is invalid, there is no room, or it has waited too long.
        """
        run = Run(self.engine, self.model, self.metrics, self.admission, self.admit(choices))

        async def read() -> tuple[ParsedRequest, Any]:
            request = await parse()
            if request.schema is None:
                return request, None
            prefix = None if request.reasoning is None else request.reasoning.prefix
            try:
                return request, await self.grammars.compile(request.schema, prefix)
            except Refused as refused:
                refused.param = request.constrained or refused.param
                raise

        try:
            run.request, matcher = await self.work(read, run.ticket)
            await self._start(run, run.request, matcher)
            await run.join(run.choices[0])
        except BaseException:
            run.close()
            raise
        return run

    async def _start(self, run: Run, request: ParsedRequest, matcher: Any) -> None:
        """Give each choice of a request to the engine."""
        name = self.drafters.chosen(request)
        run.used = self.drafters.shown(name)
        references = [request.prediction] if request.prediction and name != "off" else []
        for index in range(len(request.prompts) * request.n):
            prompt, began = request.prompts[index // request.n], self.admission.clock()
            params = request.choice(index)
            drafts = params.drafts
            params = replace(
                params, speculation=replace(drafts, drafter=name, memory=drafts.memory or request.salt)
            )
            criteria, processors = None, list[Any]()
            if matcher is not None:
                grammar = self.grammars.of(matcher, request, len(prompt))
                processors, criteria = [grammar], grammar.ended
            if request.reasoning is not None and request.reasoning.budget is not None:
                processors.append(Budget(self.model, request.reasoning, len(prompt)))
            params = replace(params, logits_processors=processors)
            trace = Trace(run.used) if request.trace else None
            if trace is not None:
                params = Traced.of(params, trace)
            try:
                handle = await self.engine.add(
                    prompt,
                    params,
                    criteria=criteria,
                    references=references,
                    source=request.source,
                    salt=request.salt,
                    client=CLIENT.get(),
                )
            except Exception as error:
                raise refusal(self.engine.failed or error) from error
            run.choices.append(Choice(index, prompt, handle, run.used, began, trace))

    # -- ending ------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish, and end the rest after this many seconds."""
        self.draining = True
        with anyio.move_on_after(seconds):
            await self.admission.empty.wait()
        await self.close()

    async def close(self) -> None:
        """End the engine and the processes."""
        await self.engine.shutdown(drain=False)
        store, self._store = self._store, None  # once
        if store is not None and self.engine.failed is None:
            try:
                await asyncio.to_thread(self._own.save_prefixes, store)
            except OutpaceError as error:
                _log.warning("prompts are not stored: %s", error)
        await self.texts.close()
        await self.images.close()
        await self.grammars.close()


def exactness(engine: Engine) -> dict[str, Any]:
    """Fields of each response whose tokens may not be plain decoding's; empty if they are promised to be."""
    verifier, target = engine.verifier, engine.target
    if not verifier.lossy and target.promise != "not exact":
        return {}
    return {
        "exactness": {
            "promise": "not exact",
            "reason": str(verifier) if verifier.lossy else target.why_inexact,
        }
    }
