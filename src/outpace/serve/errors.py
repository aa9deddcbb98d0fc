"""Refusals of requests, and their responses in the format of each API."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from outpace.core import ContextOverflow, OutpaceError, first_line

_MOST = 1000  # characters of a message, which may quote what a client sent
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = {**_TYPES, 413: "request_too_large", 503: "overloaded_error"}
_log = logging.getLogger("outpace.serve")


class NotStarted(Exception):
    """A process for clients' texts cannot be started."""


@dataclass
class Refused(Exception):
    """A refusal: a response with a status other than 200.

    Attributes:
        status: HTTP status.
        message: the reason and the remedy.
        param: the invalid field of the request.
        code: machine-readable name of the error.
        headers: headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.message) > _MOST:
            self.message = f"{self.message[:_MOST]}..."
        self.param = self.param and self.param[:_MOST]

    @property
    def type(self) -> str:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPES.get(self.status, default)

    def openai(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC.get(self.status, default)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def later(status: int, message: str, code: str, seconds: float) -> Refused:
    """A refusal of a request that may be repeated after this many seconds."""
    headers = {"Retry-After": str(max(1, math.ceil(seconds))), "x-should-retry": "true"}
    return Refused(status, message, code=code, headers=headers)


def unknown_model(model: str, there: Iterable[str]) -> Refused:
    """A refusal of a request for a model that is not one of those that are there."""
    names = ", ".join(map(repr, there))
    return Refused(404, f"there is no model {model!r} here; there is {names}", "model", "model_not_found")


def unreadable(error: Exception) -> Refused:
    """The response to an error while a request was read: the client's, since nothing else was at work."""
    if not isinstance(error, Refused | OutpaceError | NotStarted):
        _log.warning("a request could not be read", exc_info=error)
        return Refused(400, f"the request cannot be read: {type(error).__name__}: {first_line(error)}")
    return refusal(error)


def refusal(error: BaseException) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, ContextOverflow):
        return Refused(400, str(error), code="context_length_exceeded")
    if isinstance(error, OutpaceError):
        return Refused(400, str(error))
    return Refused(500, f"the request failed: {type(error).__name__}: {error}", code="request_failed")


def error_response(path: str, refused: Refused) -> Response:
    """The response to a refused request, in the format of the API at this path."""
    error = refused.anthropic() if path.startswith("/v1/messages") else refused.openai()
    return Response(to_json(error), refused.status, refused.headers, "application/json")
