"""Middleware of every request: its id, the keys, the access log. Plain ASGI, so that it sees disconnects."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.core import OutpaceError
from outpace.serve.errors import Refused
from outpace.serve.messages import error_body
from outpace.serve.page import FILES
from outpace.serve.shapes import answer
from outpace.serve.telemetry import note

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

access = logging.getLogger("outpace.access")
_LINGER = 30.0  # seconds for which a refused body is received
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
OPEN = {"/health", "/health/ready", *FILES}  # monitors have no key


class Keys:
    """Keys of which requests must send one; without keys, all requests are accepted.

    Only digests are kept. Each request is compared with all of them, in a time independent of their values.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: Path | None, environment: str = "") -> Keys:
        """The keys of a file, one per line, and of an environment variable, separated by commas.

        Raises:
            OutpaceError: the file cannot be read, or contains no key.
        """
        keys = [key.strip() for key in environment.split(",") if key.strip()]
        if path is not None:
            try:
                lines = path.read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise OutpaceError(f"cannot read the keys in {path}: {error}") from error
            found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not found:
                raise OutpaceError(f"{path} contains no key; write one per line")
            keys += found
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def tenant(self, headers: Headers) -> str | None:
        """The tenant of a request's key; None if no key is needed.

        Raises:
            Refused: the key is missing or wrong.
        """
        if not self._digests:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        equal = [hmac.compare_digest(digest, key) for key in self._digests]
        if not any(equal):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY or x-api-key"
            raise Refused(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return digest.hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def error_response(scope: Scope, refused: Refused) -> Response:
    """An error in the format of the request's API."""
    anthropic = scope["path"].startswith("/v1/messages")
    response = answer(error_body(refused) if anthropic else refused.body())
    response.status_code = refused.status
    response.headers.update(refused.headers)
    return response


class _Body:
    """A request's body, of which a response may leave a part unread.

    A connection that is closed then is reset, and a client that is still sending never sees the response.

    Attributes:
        left: whether a part of it has not been received yet.
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


class Door:
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
        except Refused as refused:
            await error_response(scope, refused)(scope, body.receive, sending)
        else:
            await self._app(scope, body.receive, sending)
        finally:
            line["seconds"] = round(time.monotonic() - began, 6)
            access.info("%s", json.dumps({"time": round(time.time(), 3)} | line))
            if self._tracer is not None:
                note(self._tracer, headers, line)
