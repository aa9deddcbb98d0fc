"""A service in a test's event loop, and a client that speaks ASGI: it can leave, and stop reading."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI

from outpace.core import Generation, SamplingParams
from outpace.engine.engine import Engine
from outpace.loading import Loaded, load
from outpace.serve.admission import Limits
from outpace.serve.auth import Keys
from outpace.serve.engine import make_engine
from outpace.serve.routes import make_app
from outpace.serve.service import Service

T = TypeVar("T")
STORY = [{"role": "user", "content": "Tell me a story about a dog."}]
PERSON = {
    "type": "object",
    "properties": {
        "favourite_colour": {"enum": ["red", "green"]},
        "number_of_children": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["favourite_colour", "number_of_children"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
# On a busy machine no request fails by the time that it takes; tests of such limits name them.
PATIENT: dict[str, Any] = {"wait": 3600, "head": 3600, "receive": 3600, "send": 3600, "stuck": 3600}
LONG = {"messages": STORY, "max_tokens": 1900, "ignore_eos": True, "stream": True}


@lru_cache(maxsize=1)
def model() -> Loaded:
    """The embedded model, in a precision in which a batch does not change a token."""
    return load(None, "float64", "cpu")


def engine_text(prompt: list[int], **params: Any) -> tuple[list[int], str]:
    """The text of plain decoding."""
    engine = Engine(model().target, tokenizer=model().tokenizer)
    (found,) = engine.generate([prompt], SamplingParams(**params))
    return found.tokens, found.text or ""


def story() -> list[int]:
    return model().encode_chat(STORY)


def told(**params: Any) -> Generation:
    """What an engine of its own tells, by default greedily."""
    engine = Engine(model().target, tokenizer=model().tokenizer)
    return engine.generate([story()], SamplingParams(**params))[0]


def run(main: Callable[[], Awaitable[T]], seconds: float = 120) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main(), seconds)

    return asyncio.run(limited())


class Exchange:
    """One request and its response, as it comes.

    Attributes:
        status, headers: None and empty until the head has come.
        reads: cleared, the client accepts no more chunks.
    """

    def __init__(
        self,
        app: FastAPI,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        address: str = "testclient",
    ) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.reads = asyncio.Event()
        self.reads.set()
        self._left = asyncio.Event()
        self._asked = False
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": pairs,
            "server": ("testserver", 80),
            "client": (address, 50000),
        }
        self._body = body
        self.task = asyncio.ensure_future(self._run(app))

    async def _run(self, app: FastAPI) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            self._chunks.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        await self.reads.wait()
        if message["body"]:
            self._chunks.put_nowait(message["body"])

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def chunk(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        return await self._chunks.get()

    async def text(self) -> str:
        """The whole body, from here on."""
        pieces = []
        while (piece := await self.chunk()) is not None:
            pieces.append(piece)
        await self.task
        return b"".join(pieces).decode()

    async def json(self) -> Any:
        return json.loads(await self.text())

    async def events(self) -> list[Any]:
        """The data of all server-sent events; "[DONE]" as a text."""
        return [
            data if data == "[DONE]" else json.loads(data)
            for line in (await self.text()).splitlines()
            if line.startswith("data: ") and (data := line.removeprefix("data: "))
        ]


class Client:
    """Sends requests to an application in this event loop.

    Attributes:
        address: from which they come.
    """

    def __init__(self, app: FastAPI, service: Service, engine: Engine) -> None:
        self.app, self.service, self._engine = app, service, engine
        self.address = "testclient"

    def at(self, address: str) -> Client:
        """The same client at another address."""
        other = copy.copy(self)
        other.address = address
        return other

    @contextmanager
    def paced(self) -> Iterator[None]:
        """The engine takes eight steps, and then one whenever something arrives: a long text does not end."""
        step, inbox = self._engine.step, self.service.engine._inbox
        free, paced = 8, True

        def waits() -> Any:
            nonlocal free
            while paced and not free and inbox.empty():
                time.sleep(0.001)
            free = max(0, free - 1)
            return step()

        self._engine.step = waits  # type: ignore[method-assign]
        try:
            yield
        finally:
            paced = False

    def send(self, path: str, body: Any = None, method: str = "", **headers: str) -> Exchange:
        """Send a request; ``body`` is bytes, or what is sent as JSON."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return Exchange(
            self.app,
            method or ("GET" if body is None else "POST"),
            path,
            raw,
            {"content-type": "application/json", "content-length": str(len(raw)), **given},
            self.address,
        )

    def chat(self, **more: Any) -> Exchange:
        return self.send("/v1/chat/completions", {"messages": STORY, "temperature": 0, **more})

    def complete(self, prompt: Any, **more: Any) -> Exchange:
        return self.send("/v1/completions", {"prompt": prompt, "temperature": 0, **more})

    async def get(self, path: str) -> Any:
        return await self.send(path).json()

    async def empty(self) -> None:
        """Wait until no room is reserved, and check that the engine decodes nothing."""
        await self.service.admission.empty.wait()
        one = SamplingParams(max_new_tokens=1)
        await self.service.engine.generate([5], one)  # after it, what was cancelled is out
        assert self.service.engine.running == self.service.engine.waiting == 0


@asynccontextmanager
async def serving(
    drafter: str = "prompt_lookup",
    keys: tuple[str, ...] = (),
    others: dict[str, str] | None = None,
    change: Callable[[Engine], None] = lambda engine: None,
    on_failure: Callable[[], object] | None = None,
    memory: float | int = 0.2,
    loaded: Loaded | None = None,
    learner: Any = None,
    store: Path | None = None,
    **limits: Any,
) -> AsyncIterator[Client]:
    """A service of a model, and a client of it.

    Args:
        loaded: the model; None for the embedded one.
        learner: what the drafter learns with; it has its own drafter.
        change: is given the engine before it is used.
        store: the folder that keeps its prefix cache.
    """
    chosen = Limits(**PATIENT | limits)
    served = loaded or model()
    own = drafter if learner is None else learner.drafter
    engine = make_engine(served, own, chosen, others, learner, adaptive=False, memory=memory)
    change(engine)
    app = make_app(Keys(keys), chosen)
    service = Service(served, engine, chosen, ["nano", "other name"], on_failure=on_failure, store=store)
    app.state.service = service
    try:
        yield Client(app, service, engine)
    finally:
        await service.close()


@contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], str, float]]:
    """A server in a process: it, its address, and the seconds that its start took by its own account."""
    command = [
        sys.executable,
        "-m",
        "outpace",
        "serve",
        "--port",
        "0",
        "--dtype",
        "float64",
        "--memory",
        "0.2",
        "--no-access-log",  # nobody reads it
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if ready := re.search(r"ready after ([\d.]+) s", said):
                address = re.search(r"API +(http://\S+)/v1", said)
                assert address is not None
                yield process, address[1], float(ready[1])
                return
        raise AssertionError(said)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
