"""HTTP/1.1 on a connection, within limits of size and time, of which uvicorn's protocol has none."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httptools
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from outpace.serve.admission import Limits
from outpace.serve.errors import Refused
from outpace.serve.totals import Total, network

_HEAD = 2**16  # bytes of a head, and of what frames a body beside 8 bytes for each of its own
_FRAME = 9
_PIECE = 2**12  # bytes that are parsed at a time, so that few requests are known before their turn
_AHEAD = 2**20  # bytes of later requests that wait for the answers to earlier ones
_LINGER = 5.0  # seconds for a client to take the reason why its connection ends
_PROBE = 1.0  # seconds between two probes of a client that has closed its side
_HOST = re.compile(rb"[^\s/?#@\\]*")
_GOING_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


class Guarded(HttpToolsProtocol):
    """A connection that ends if a head is too long, a request too slow, or its answers are not read.

    It may also be one too many. Requests may be sent ahead of the answers to earlier ones. An offer to change
    to another protocol is declined by an answer in this one. A client that has closed its side gets its
    answer; since one that has left looks the same, it is sent ``100 Continue`` now and then, which a client
    ignores, and to which the system of one that has left replies with a reset.

    Args:
        limits: those of the server.
        places: the connections that there may be.
        given: the arguments of uvicorn's protocol.
    """

    def __init__(self, *given: Any, limits: Limits, places: Total, **more: Any) -> None:
        super().__init__(*given, **more)
        self._limits, self._places = limits, places
        self._extra = 0  # bytes of the message that are not its body
        self._timer: asyncio.TimerHandle | None = None
        self._ends = False  # nothing more is read
        self._reason: Refused | None = None  # to be sent after the answers to earlier requests
        self._since = 0.0  # since when it has been idle
        self._unread: asyncio.TimerHandle | None = None
        self._left = 0  # bytes that had not been sent when the timer was set
        self._ahead = bytearray()  # what was received, and is parsed later
        self._open: list[RequestResponseCycle] = []  # requests without a whole answer, the first one's first
        self._probe: asyncio.TimerHandle | None = None
        self._half = False  # the client has closed its side

    @property
    def address(self) -> str:
        """The client's address or network."""
        return network(self.client[0]) if self.client else ""

    @property
    def idle(self) -> bool:
        """True between requests, and before the head of the first is complete."""
        return not self._open

    @property
    def _asked(self) -> bool:
        """True if requests that have arrived whole are not answered yet."""
        return any(not cycle.more_body for cycle in self._open)

    # -- the connection ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport.set_write_buffer_limits(0)  # so that ``pause_writing`` tells of any rest
        self._since = self.loop.time()
        self._within(self._limits.head)
        if not self._places.take(self.address, 1):
            self._make_room()

    def _make_room(self) -> None:
        """Close a connection that is idle, of the address that has most, for longest; or else this one."""
        idle = [one for one in self.connections if isinstance(one, Guarded) and one is not self and one.idle]
        self._places.take(self.address, 1, force=True)
        if idle:
            held = self._places.held
            min(idle, key=lambda one: (-held[one.address], one._since)).transport.abort()
        else:
            self._refuse(
                Refused(503, "the server has too many connections; try again later", code="overloaded")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.give(self.address, 1)
        self._within(None)
        self._read()
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        """Tell the handlers of all requests that their client has gone."""
        self._ahead.clear()
        self.pipeline.clear()
        if self._probe is not None:
            self._probe.cancel()
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection until what the client has asked is answered."""
        self._half = True
        if self._ends or not (self._open or self._ahead):
            return False
        self._ask()
        if not self._ahead:
            self._end_of_input()
        return True

    def _end_of_input(self) -> None:
        if self._open and self._open[-1].more_body:
            self._refuse(Refused(400, "the request ended before its body; send all of it"))

    def _ask(self) -> None:
        """Find out later whether a client that has closed its side is still there."""
        self._probe = self.loop.call_later(_PROBE, self._probed)

    def _probed(self) -> None:
        if self._open and not self._ends and not self.transport.is_closing():
            first = self._open[0]
            if not first.response_started and first.scope["http_version"] == "1.1":
                self.transport.write(_GOING_ON)
            self._ask()

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

    # -- requests ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._ends:
            return
        self._unset_keepalive_if_required()
        self._ahead += data
        if len(self._ahead) > _AHEAD + len(data):
            self._refuse(Refused(400, "too many requests are sent ahead of their answers; read some first"))
        else:
            self._parse()

    def _parse(self) -> None:
        """Parse what has arrived, up to the first request that waits for the answer to another."""
        while self._ahead and not (self.pipeline or self._ends or self.transport.is_closing()):
            piece = bytes(self._ahead[:_PIECE])
            del self._ahead[:_PIECE]
            self._extra += len(piece)
            self._feed(piece)
            if self._extra > _HEAD:
                self._refuse(Refused(431, f"the head of the request has more than {_HEAD} bytes; send less"))
        if self._ahead:
            self.flow.pause_reading()
        elif self._half and not self._ends:
            self._end_of_input()

    def _feed(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(piece[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            refused = error.__context__
            if not isinstance(refused, Refused):
                refused = Refused(400, f"this is no request of HTTP/1.1: {error}")
            self._refuse(refused)

    def _stay(self, rest: bytes) -> None:
        """Read a request that offers another protocol as if it did not: the parser leaves out its body."""
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"".join([*head, b"\r\n"]))
        self._ahead[:0] = rest
        self._extra -= len(rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._within(self._limits.head)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return
        check_head(version, self.parser.get_method(), self.headers)
        super().on_headers_complete()
        self._open.append(self.cycle)
        self._within(self._limits.receive)

    def on_body(self, body: bytes) -> None:
        self._extra = max(0, self._extra - _FRAME * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._within(None)
        self._extra = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        if self._reason is not None and not self._asked:
            self._refuse(self._reason)
        super().on_response_complete()
        if self.transport.is_closing() or self._ends:
            return
        if self._ahead:
            self._unset_keepalive_if_required()
            self.loop.call_soon(self._parse)
        elif self._half and not self._open:
            self.transport.close()

    # -- refusals ----------------------------------------------------------------------------------------

    def _within(self, seconds: float | None) -> None:
        """Refuse the request unless its next part arrives within this time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self.flow.read_paused or self._ahead or self.pipeline:  # the server's own doing
            self._within(self._limits.head)
        elif self.idle and not self._extra:
            self.transport.close()  # nothing was asked
        else:
            self._refuse(Refused(408, "the request took too long to arrive; send it faster"))

    def _refuse(self, refused: Refused) -> None:
        """Send the reason once earlier requests are answered, and close once the client could read it."""
        self._ends, self._reason = True, refused
        self._within(None)
        if self._asked and not self.transport.is_closing():
            return
        started = any(cycle.response_started for cycle in self._open)
        self._forget()
        if self.transport.is_closing():
            return
        if not started:
            body = to_json(refused.openai())
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[refused.status] + head % len(body) + body)
        if self._half:  # it sends nothing that would be left unread
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER, self.transport.abort)


def check_head(version: str, method: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Check what a request says of its host and its body.

    Raises:
        Refused: with the status that HTTP gives the mistake.
    """
    if method == b"CONNECT":
        raise Refused(501, "CONNECT is for proxies, and this is none; send POST or GET")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise Refused(400, f"a request has one Host header, and this one has {len(hosts)}")
    if not all(_HOST.fullmatch(host) for host in hosts):
        raise Refused(400, "the Host header has no host; send the server's name or address")
    codings = b",".join(value.lower() for name, value in headers if name == b"transfer-encoding")
    if codings and version != "1.1":
        raise Refused(400, "only HTTP/1.1 has Transfer-Encoding; send Content-Length")
    if codings and codings.strip() != b"chunked":
        raise Refused(501, "the only Transfer-Encoding here is chunked; send the body as it is")
    if any(name == b"expect" and value.lower() != b"100-continue" for name, value in headers):
        raise Refused(417, "the only expectation that can be met is 100-continue; leave Expect out")
