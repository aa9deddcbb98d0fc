"""HTTP on a connection, within limits of size and time, of which uvicorn's protocol has none."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outpace.serve.admission import Limits
from outpace.serve.errors import Refused

_HEAD = 2**16  # bytes of a head, and of what frames a body beside 8 bytes for each of its own
_FRAME = 9
_PIPELINED = 8  # requests that a connection may send ahead
_LINGER = 5.0  # seconds for a client to take the reason why its connection ends


class Guarded(HttpToolsProtocol):
    """A connection that ends if a head is too long, a request too slow, or its answers are not read.

    It may also be one too many.

    Args:
        limits: those of the server.
        given: the arguments of uvicorn's protocol.
    """

    def __init__(self, *given: Any, limits: Limits, **more: Any) -> None:
        super().__init__(*given, **more)
        self._limits = limits
        self._extra = 0  # bytes of the message that are not its body
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._since = 0.0  # since when it has been idle
        self._unread: asyncio.TimerHandle | None = None
        self._left = 0  # bytes that had not been sent when the timer was set

    @property
    def idle(self) -> bool:
        """True between requests, and before the head of the first is complete."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport.set_write_buffer_limits(0)  # so that ``pause_writing`` tells of any rest
        self._since = self.loop.time()
        self._within(self._limits.head)
        if len(self.connections) > self._limits.connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest; if none is, this one."""
        others = [
            one for one in self.connections if isinstance(one, Guarded) and one is not self and one.idle
        ]
        if others:
            min(others, key=lambda one: one._since).transport.abort()
        else:
            self._refuse(
                Refused(503, "the server has too many connections; try again later", code="overloaded")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._within(None)
        self._read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._read()
        super().resume_writing()

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None

    def _wait_for_reader(self) -> None:
        self._read()
        self._left = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self._limits.send, self._stalled)

    def _stalled(self) -> None:
        """End a connection that has taken nothing for a time; closing one waits until it has taken all."""
        if self.transport.get_write_buffer_size() < self._left:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._extra += len(data)
        super().data_received(data)
        if self._extra > _HEAD or len(self.pipeline) > _PIPELINED:
            self._refuse(Refused(431, f"the head of the request has more than {_HEAD} bytes; send less"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._within(self._limits.head)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._within(self._limits.receive)

    def on_body(self, body: bytes) -> None:
        self._extra = max(0, self._extra - _FRAME * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._within(None)
        self._extra = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def _within(self, seconds: float | None) -> None:
        """Refuse the request unless its next part arrives within this time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self.flow.read_paused:  # the server's own doing
            self._within(self._limits.head)
        elif self.idle and not self._extra:
            self.transport.close()  # nothing was asked
        else:
            self._refuse(Refused(408, "the request took too long to arrive; send it faster"))

    def _refuse(self, refused: Refused) -> None:
        """Send the reason if no response has begun, and close once the client could read it."""
        self._refused = True
        self._within(None)
        if self.transport.is_closing():
            return
        if self.idle or not self.cycle.response_started:
            body = to_json(refused.openai())
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[refused.status] + head % len(body) + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER, self.transport.abort)
