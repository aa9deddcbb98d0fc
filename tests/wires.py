"""A server on a port of its own, and connections to it, byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from outpace.serve.admission import Limits
from outpace.serve.auth import Keys
from outpace.serve.engine import make_engine
from outpace.serve.listening import listen
from outpace.serve.server import Options, Server
from serving import PATIENT, STORY, model

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n"


@asynccontextmanager
async def listening(keys: tuple[str, ...] = (), **limits: Any) -> AsyncIterator[tuple[Server, int]]:
    """A server of the embedded model on a port of its own."""
    ready = asyncio.Event()
    listener = listen("127.0.0.1", 0)
    chosen = Limits(**PATIENT | limits)
    server = Server(
        Options(drain=0, names=["nano"], limits=chosen, keys=Keys(keys)),
        lambda: (model(), make_engine(model(), "none", chosen, memory=0.2)),
        lambda service: ready.set(),
    )
    serving = asyncio.ensure_future(server.serve([listener]))
    await ready.wait()
    try:
        yield server, listener.getsockname()[1]
    finally:
        for one in list(server.server_state.connections):  # which wait for clients to read and close
            one.transport.abort()
        server.should_exit = True
        await serving


def limit_buffers(server: Server) -> None:
    """Let the system keep little of what is sent and not read."""
    for listening in server.servers:
        for one in listening.sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


async def opened(port: int, data: bytes = b"", buffer: int | None = None) -> Streams:
    """A connection on which this is sent; ``buffer`` is the size of the buffer for what it receives."""
    client = socket.create_connection(("127.0.0.1", port)) if buffer is None else socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.connect(("127.0.0.1", port))
    client.setblocking(False)
    streams = await asyncio.open_connection(sock=client)
    streams[1].write(data)
    return streams


async def answered(streams: Streams) -> tuple[int, Any]:
    """The status and the body of the next response."""
    reader, _ = streams
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.partition("content-length: ")[2].split()[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(size))


async def sent(streams: Streams, pieces: int, piece: bytes) -> None:
    """Send as much as the server takes."""
    for _ in range(pieces):
        streams[1].write(piece)
        await streams[1].drain()


def chat(**more: Any) -> bytes:
    body = json.dumps({"messages": STORY, "max_tokens": 1, **more}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body
