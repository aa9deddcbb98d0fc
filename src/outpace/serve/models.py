"""One of the models of a router: whether it is loaded, and who needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outpace.serve.errors import Refused
from outpace.serve.metrics import Metrics
from outpace.serve.room import Known
from outpace.serve.service import Service


@dataclass(eq=False)
class Model:
    """A model of a router, loaded or not.

    Attributes:
        known: what is known of it before it is loaded.
        service: it, while it is loaded.
        loading: the task that loads it, or waits for room to.
        begun: whether its loading can no longer be called off.
        leaving: done once it is unloaded; its requests wait for that.
        error: why it was last not loaded, or has failed.
        card: what ``/v1/models`` says of it, from when it was last loaded.
        uses: number of requests that need it loaded, besides the choices in its service.
        unused: set while there are none.
        used: the time of the latest of them.
    """

    known: Known
    metrics: Metrics
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    service: Service | None = None
    loading: asyncio.Task[None] | None = None
    begun: bool = False
    leaving: asyncio.Future[None] | None = None
    watcher: asyncio.Task[None] | None = None
    error: Refused | None = None
    card: dict[str, Any] | None = None
    uses: int = 0
    used: float = 0.0

    @classmethod
    def of(cls, known: Known) -> Model:
        """A model that is not loaded."""

        def read(value: Callable[[Service], float | None]) -> Callable[[], float]:
            return lambda: (value(model.service) or 0.0) if model.service is not None else 0.0

        metrics = Metrics(
            known.name,
            read(lambda service: service.engine.running),
            read(lambda service: max(0, service.admission.inside - service.engine.running)),
            read(lambda service: service.engine.memory_use),
        )
        model = cls(known, metrics)
        model.unused.set()
        return model

    @property
    def state(self) -> str:
        """Its state, in llama-server's words."""
        if self.leaving is not None:
            return "unloading"
        if self.service is not None:
            return "loaded"
        return "unloaded" if self.loading is None else "loading"

    def is_loaded(self) -> float:
        """1 while it is loaded, as a metric."""
        return float(self.service is not None)

    @property
    def busy(self) -> bool:
        """True while a request needs it."""
        return bool(self.uses or (self.service is not None and self.service.admission.inside))

    @property
    def since(self) -> float:
        """The time since when no request needs it, if none does."""
        return self.used if self.service is None else max(self.used, self.service.admission.emptied)

    def loads_no_more(self, _: asyncio.Future[None]) -> None:
        """Note the end of its loading."""
        self.loading = None

    def stays(self) -> None:
        """Let the requests go on that have waited for the model to leave."""
        if self.leaving is not None:
            self.leaving.set_result(None)
            self.leaving = None

    async def idle(self) -> None:
        """Wait until no request needs it."""
        while self.busy:
            await self.unused.wait()
            if self.service is not None:
                await self.service.admission.empty.wait()
