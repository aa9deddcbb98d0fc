"""Middleware of every request: its id, its key, the access log. Plain ASGI, so that it sees disconnects."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING, Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.serve.auth import OPEN, Keys
from outpace.serve.errors import Refused, error_response
from outpace.serve.telemetry import note
from outpace.serve.totals import CLIENT, network

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

access = logging.getLogger("outpace.access")
_LINGER = 30.0  # seconds for which a refused body is received
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class _Body:
    """A request's body, of which a response may leave a part unread.

    A connection that is closed then is reset, and a client that is still sending never sees the response.
    """

    def __init__(self, headers: Headers, receive: Receive) -> None:
        self._receive = receive
        sends = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self.left = sends and "expect" not in headers  # a client that asks first sends nothing if refused

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self.left = False
        return message

    async def rest(self) -> None:
        """Receive what is left, for a while, and forget it."""
        with anyio.move_on_after(_LINGER):
            while self.left:
                await self.receive()


class Middleware:
    """Middleware that gives each request an id, checks its key, and logs one line when it has ended.

    Args:
        tracer: tracer that gets a span of each request; None for none.
    """

    def __init__(self, app: ASGIApp, keys: Keys, tracer: Tracer | None = None) -> None:
        self._app = app
        self._keys = keys
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        identifier = given if _ID.fullmatch(given) else secrets.token_hex(8)
        state = scope.setdefault("state", {})
        began = time.monotonic()
        line: dict[str, Any] = {"id": identifier, "method": scope["method"], "path": scope["path"]}
        line["status"] = None  # if the client disconnects before there is one

        body = _Body(headers, receive)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                line["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = identifier
            elif body.left and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await body.rest()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            state["tenant"] = None if scope["path"] in OPEN else self._keys.tenant(headers)
            CLIENT.set(state["tenant"] or network((scope.get("client") or ("",))[0]))
        except Refused as refused:
            await error_response(scope["path"], refused)(scope, body.receive, sending)
        else:
            await self._app(scope, body.receive, sending)
        finally:
            line["seconds"] = round(time.monotonic() - began, 6)
            access.info("%s", json.dumps({"time": round(time.time(), 3)} | line))
            if self._tracer is not None:
                note(self._tracer, headers, line)
