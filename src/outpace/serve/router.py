"""Several models in one server: each is loaded when a request names it, and unloaded for others.

Each has an engine of its own. Their steps take turns, as does loading; their requests share the limits of one
queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge

from outpace.core import OutpaceError
from outpace.engine.engine import Engine
from outpace.engine.fair import FairLock
from outpace.loading import Loaded
from outpace.loading.apart import loaded_apart
from outpace.serve.admission import Limits, choices_in
from outpace.serve.errors import Refused, later, unknown_model
from outpace.serve.metrics import Joined
from outpace.serve.models import Model
from outpace.serve.pool import spare
from outpace.serve.room import Known, Room, release
from outpace.serve.service import Service
from outpace.serve.totals import CLIENT, Turns

_log = logging.getLogger("outpace.serve")


class Router:
    """The models of a server by their names; made in the event loop that it serves. A ``Host``.

    Args:
        known: the models; requests without a name get the first.
        room: the memory for them.
        idle: seconds without a request after which a model is unloaded; None for never.
        store: the folder that keeps the prefix caches from one process to the next; None for none.
        clock, sleep: the time in seconds, and a wait for some.
    """

    def __init__(
        self,
        known: Sequence[Known],
        limits: Limits,
        room: Room,
        *,
        idle: float | None = None,
        store: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.limits, self.room = limits, room
        self.draining = self._closed = False
        self._idle, self._store, self._clock, self._sleep = idle, store, clock, sleep
        self._total = choices_in(limits)
        self._steps, self._jobs = FairLock(), Turns(spare())
        self._line = asyncio.Lock()  # one is loaded at a time, in the order of requests
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()  # those of them that are not called off
        self.created = int(time.time())
        self.models = {one.name: Model.of(one) for one in known}
        registry = CollectorRegistry()
        gauge = Gauge(
            "outpace:model_loaded", "1 while the model is loaded.", ["model_name"], registry=registry
        )
        for name, model in self.models.items():
            gauge.labels(name).set_function(partial(Model.is_loaded, model))
        self._loads = Counter("outpace:model_loads", "Loads.", ["model_name"], registry=registry)
        self._unloads = Counter(
            "outpace:model_unloads", "Unloads.", ["model_name", "reason"], registry=registry
        )
        self._own = registry

    # -- requests ----------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.draining:
            raise later(503, "the server is shutting down; use another one", "draining", 1)

    @asynccontextmanager
    async def use(self, model: str | None) -> AsyncIterator[Service]:
        self.check()
        one = self._named(next(iter(self.models)) if model is None else model)
        async with self._needed(one):
            yield await self._ready(one)

    def _named(self, name: str) -> Model:
        if name not in self.models:
            raise unknown_model(name, self.models)
        return self.models[name]

    @asynccontextmanager
    async def _needed(self, model: Model) -> AsyncIterator[None]:
        """A context in which a model is not unloaded."""
        while model.leaving is not None:
            await self._waiting(model, model.leaving)
        model.uses += 1
        model.used = self._clock()
        model.unused.clear()
        try:
            yield
        finally:
            model.uses -= 1
            model.used = self._clock()
            if not model.uses:
                model.unused.set()
                if model.loading is not None and not model.begun:  # all who asked for it have left
                    model.loading.cancel()

    async def _ready(self, model: Model) -> Service:
        while model.service is None:
            if self._closed:
                self.check()
            if model.loading is None:
                model.error, model.begun = None, False
                model.loading = self._task(self._load(model))
                model.loading.add_done_callback(model.loads_no_more)  # even if it is cancelled at once
            await self._waiting(model, model.loading)
            if model.service is None and model.error is not None:
                raise replace(model.error)
        return model.service

    async def _waiting(self, model: Model, event: asyncio.Future[None]) -> None:
        """Wait for a model, with a place in the queue; what is waited for goes on if this one leaves."""
        client = CLIENT.get()
        if not self._total.take(client, 1):
            model.metrics.refused("overload")
            message = f"the server is full: {self._total.all} of {self.limits.choices} choices are waiting"
            raise later(429, message, "overloaded", 1)
        try:
            await asyncio.wait({event})
        finally:
            self._total.give(client, 1)

    def _task(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- loading -----------------------------------------------------------------------------------------

    async def _load(self, model: Model) -> None:
        """Load a model once there is room; an error is left in ``model.error``."""
        try:
            async with self._line:
                await self._make_room(model)
                model.begun = True
                began = self._clock()
                model.service = await self._loaded(model)
                model.used = self._clock()
            self._loads.labels(model.known.name).inc()
            _log.info("%s is loaded, in %.1f s", model.known.name, model.used - began)
            if self._idle is not None:
                model.watcher = self._task(self._watch(model, self._idle))
        except Refused as refused:
            model.error = refused
        except Exception as error:  # a model's files and code may raise anything
            if not isinstance(error, OutpaceError):
                _log.warning("%s cannot be loaded", model.known.name, exc_info=error)
            model.error = _final(f"{model.known.name} cannot be loaded: {error}", "not_loaded")
        finally:
            if model.service is None and model.begun:
                await release()

    async def _loaded(self, model: Model) -> Service:
        known = model.known
        given = self.room.give(known, [one.known for one in self.models.values() if one.service is not None])

        def load() -> tuple[Loaded, Engine]:
            known.read()
            with self._steps:
                return known.load(given)

        loaded, engine = await loaded_apart(load)
        store = self._store and self._store / quote(known.name, safe="")
        if store is not None:
            engine.check_prefix_store()
        service = Service(
            loaded,
            engine,
            self.limits,
            [known.name],
            clock=self._clock,
            on_failure=lambda: self._failed(model),
            store=store,
            metrics=model.metrics,
            total=self._total,
            turn=self._steps,
            jobs=self._jobs,
        )
        (model.card,) = service.cards()
        return service

    async def _make_room(self, model: Model) -> None:
        """Unload others, the longest idle first, until a model fits."""
        self.room.check(model.known)
        until = self._clock() + self.limits.wait
        try:
            while self.room.lacks(model.known, [one.known for one in self._inside()]):
                others = [one for one in self._inside() if one.leaving is None]
                leaving = [one.leaving for one in self._inside() if one.leaving is not None]
                with anyio.fail_after(max(0.0, until - self._clock())):
                    if others:
                        oldest = min(others, key=lambda one: (one.busy, one.since))
                        await self._unload(oldest, "memory")
                    elif leaving:
                        await asyncio.wait(leaving)
                    else:
                        raise _final(self.room.lacking(model.known), "no_memory")
        except TimeoutError:
            model.metrics.refused("wait")
            message = f"{model.known.name} has waited for more than {self.limits.wait:g} s for others' memory"
            raise later(503, f"{message}; try again later", "waited_too_long", 1) from None

    def _inside(self) -> list[Model]:
        return [one for one in self.models.values() if one.service is not None]

    # -- unloading ---------------------------------------------------------------------------------------

    async def unload(self, model: str) -> None:
        one = self._named(model)
        if one.loading is not None:
            await asyncio.wait({one.loading})
        if one.leaving is not None:
            await asyncio.wait({one.leaving})
        elif one.service is not None:
            await asyncio.wait({self._task(self._unload(one, "request"))})  # though its client leave

    async def _unload(self, model: Model, reason: str) -> None:
        """Let no request begin, wait for those that have, and unload it; cancelled before, it stays."""
        model.leaving = asyncio.get_running_loop().create_future()
        try:
            await model.idle()
        except BaseException:
            model.stays()
            raise
        ending = self._task(self._drop(model, reason))
        self._ends.add(ending)
        ending.add_done_callback(self._ends.discard)
        with anyio.CancelScope(shield=True):
            await asyncio.shield(ending)

    async def _drop(self, model: Model, reason: str) -> None:
        service, model.service = model.service, None
        try:
            if service is not None:
                await service.close()
                del service
                await release()
        finally:
            model.stays()
        if model.watcher is not None:
            model.watcher.cancel()
        self._unloads.labels(model.known.name, reason).inc()
        _log.info("%s is unloaded: %s", model.known.name, reason)

    async def _watch(self, model: Model, idle: float) -> None:
        """Unload a model once it has been idle for long enough."""
        while model.service is not None:
            await model.idle()
            left = model.since + idle - self._clock()
            if model.leaving is not None:
                await asyncio.wait({model.leaving})
            elif left > 0:
                await self._sleep(left)
            else:
                await self._unload(model, "idle")

    def _failed(self, model: Model) -> None:
        """Unload a model whose engine's thread has died; its streams have received their error event."""
        service = model.service
        if service is None:
            return
        _log.error("the engine of %s has failed", model.known.name, exc_info=service.engine.failed)
        model.error = Refused(503, f"the engine has failed: {service.engine.failed!r}", code="engine_failed")
        if model.leaving is None:
            self._task(self._unload(model, "failed"))

    # -- the server --------------------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> Joined:
        return Joined([one.metrics for one in self.models.values()], self._own)

    def cards(self) -> list[dict[str, Any]]:
        return [self._card(one) for one in self.models.values()]

    def _card(self, model: Model) -> dict[str, Any]:
        status: dict[str, Any] = {"value": model.state}
        if model.error is not None and model.state == "unloaded":
            status |= {"failed": True, "error": model.error.message}
        card = {"id": model.known.name, "object": "model", "created": self.created, "owned_by": "outpace"}
        card["max_running"] = self.limits.running
        return card | (model.card or {}) | {"memory": model.known.bytes, "status": status}

    async def health(self) -> dict[str, Any]:
        """Whether the loaded engines answer, which wait while a model is loaded; see ``Host``."""
        slow = dict[str, None]()
        for service in [one.service for one in self.models.values() if one.leaving is None]:
            if service is not None:
                slow |= dict.fromkeys(service.slow)
                if not self._line.locked():
                    await service.check_health()
        return {"slow": list(slow)} if slow else {}

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, finish running ones and those that wait for a model; see ``Host``."""
        self.draining = True
        with anyio.move_on_after(seconds):
            for model in self.models.values():
                await model.idle()
        await self.close()

    async def close(self) -> None:
        self.draining = self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            if task not in self._ends:
                task.cancel()
        await asyncio.gather(*tasks, *self._ends, return_exceptions=True)
        for model in self._inside():
            await self._drop(model, "end")


def _final(message: str, code: str) -> Refused:
    """A refusal that would be the same at once, so that clients do not try again by themselves."""
    return Refused(503, message, "model", code, {"x-should-retry": "false"})
