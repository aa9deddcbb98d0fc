"""A server in this process: start-up, signals, shutdown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from uvicorn.server import HANDLED_SIGNALS

from outpace.core import OutpaceError
from outpace.engine.engine import Engine
from outpace.loading import Loaded
from outpace.loading.apart import loaded_apart
from outpace.serve.admission import Limits
from outpace.serve.auth import Keys
from outpace.serve.host import Host
from outpace.serve.protocol import Guarded
from outpace.serve.routes import make_app
from outpace.serve.service import Service
from outpace.serve.totals import Total

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_PLACES = 8  # connections that an address may have in any case


@dataclass(frozen=True)
class Options:
    """Options of a server.

    Attributes:
        names: names of the model in requests; empty for the model's own name.
        drain: seconds for running requests to finish after a signal.
        origins: origins whose pages may send requests from a browser.
        tracer: OpenTelemetry tracer that gets a span of each request.
        store: the folder that keeps the prefix cache from one process to the next; None for none.
    """

    names: Sequence[str] = ()
    drain: float = 30.0
    origins: Sequence[str] = ()
    tracer: Tracer | None = None
    keys: Keys = field(default_factory=lambda: Keys(()))
    limits: Limits = field(default_factory=Limits)
    store: Path | None = None


def _leave_signals_to_the_system() -> None:
    for one in HANDLED_SIGNALS:
        signal.signal(one, signal.SIG_DFL)


class Server(uvicorn.Server):
    """uvicorn server that drains on the first signal; the second ends the process, whatever its threads do.

    Args:
        load: loads the model and makes the engine; called in a thread while the server is already listening.
            Or returns what makes the host of several models, in the event loop.
        ready: called with the service, or that host, once it is ready for requests.
    """

    def __init__(
        self,
        options: Options,
        load: Callable[[], tuple[Loaded, Engine] | Callable[[], Host]],
        ready: Callable[[Any], None],
    ) -> None:
        self._options, self._load, self._ready = options, load, ready
        self.error: Exception | None = None  # the error that ended loading or the engine
        self._draining: asyncio.Task[None] | None = None
        self._signalled = False
        self.app: FastAPI = make_app(
            options.keys, options.limits, options.origins, self._open, options.tracer
        )
        config: dict[str, Any] = {"access_log": False, "log_config": None, "timeout_graceful_shutdown": 5}
        self.places = Total(options.limits.connections, _PLACES)
        config |= {"http": partial(Guarded, limits=options.limits, places=self.places), "ws": "none"}
        super().__init__(uvicorn.Config(self.app, server_header=False, **config))

    async def _open(self) -> Host | None:
        self._loop = asyncio.get_running_loop()
        try:
            made = await loaded_apart(self._load)
            host = self._service(*made) if isinstance(made, tuple) else made()
        except Exception as error:
            self.error, self.should_exit = error, True
            return None
        self._ready(host)
        return host

    def _service(self, model: Loaded, engine: Engine) -> Service:
        options = self._options
        if options.store is not None:
            engine.check_prefix_store()
        own = Path(model.name).name if Path(model.name).is_dir() else model.name
        names = options.names or (own,)
        return Service(model, engine, options.limits, names, on_failure=self._failed, store=options.store)

    def _failed(self) -> None:
        """End the server after the engine's thread has died; streams have received their error event."""
        failed = self.app.state.service.engine.failed
        self.error = OutpaceError(f"the engine has failed: {failed!r}")
        self.error.__cause__ = failed
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; a second one ends the process afterwards too."""
        try:
            with super().capture_signals():
                yield
        finally:
            if self._signalled:
                _leave_signals_to_the_system()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain, or give up loading; the next signal is the system's to handle, which ends the process."""
        self._signalled = True
        _leave_signals_to_the_system()
        if self.app.state.service is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Refuse new requests, finish running ones, and end."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self.app.state.service.drain(self._options.drain)
        self.should_exit = True
