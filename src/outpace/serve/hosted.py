"""A model behind its own app inside another server's process, which calls it message by message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from typing import Any

from starlette.types import Message

from outpace.engine.engine import Engine
from outpace.loading import Loaded
from outpace.serve.admission import Limits
from outpace.serve.auth import Keys
from outpace.serve.routes import make_app
from outpace.serve.service import Service
from outpace.serve.totals import Turns

_log = logging.getLogger("outpace.serve")


class Hosted:
    """A loaded model and its app; made in the event loop that it serves.

    Args:
        names: names of the model in requests.
        turn: a context of each step, which models of one process share; see ``AsyncEngine``.
        jobs: places for jobs of processes, which they share too; None for places of its own.
    """

    def __init__(
        self,
        model: Loaded,
        engine: Engine,
        limits: Limits,
        names: Seq[str],
        keys: Keys,
        turn: AbstractContextManager[object] | None = None,
        jobs: Turns | None = None,
    ) -> None:
        self.app = make_app(keys, limits)
        self.service = Service(model, engine, limits, names, turn=turn, jobs=jobs)
        self.app.state.service = self.service
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def answer(self, scope: MutableMapping[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The app's messages in answer to a request; closed early, the client counts as disconnected.

        Args:
            scope: the request's ASGI scope.
            body: its whole body.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        self._inside += 1
        self._empty.clear()
        task = asyncio.ensure_future(self.app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        begun = False
        try:
            while (message := await messages.get()) is not None:
                begun = True
                yield message
            if not begun:
                task.result()
        finally:
            left.set()
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None and begun:
                _log.error("a request failed", exc_info=error)
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def close(self) -> None:
        """Wait until its requests have ended, and end the engine."""
        await self._empty.wait()
        await self.service.close()
