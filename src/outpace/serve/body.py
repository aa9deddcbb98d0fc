"""A request's body: received within its limits, and parsed strictly to the type of its API."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from outpace.serve.errors import Refused, later
from outpace.serve.fields import Wire, check_size
from outpace.serve.known import refusal_of
from outpace.serve.totals import CLIENT, Total, Turns
from outpace.serve.worker import return_memory

Place = tuple[int | str, ...]
_OBJECTS = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
_EXPECTED = "Input should be "


def written_path(body: Any, place: Seq[int | str], absent: bool = False) -> Place:
    """A place without the names of types.

    A name may be both a type's and a field's, as "text"; of two readings the one counts that has the last
    step, and then the longer one.

    Args:
        absent: the last step is a field that is not there.
    """
    if absent:
        *above, last = place
        readings = [path for path, holder in _readings(body, above) if isinstance(holder, dict)]
        return (*max(readings, key=len, default=()), last)
    paths = [path for path, _ in _readings(body, place)]
    return max(paths, key=lambda path: (path[-1:] == (place[-1],), len(path)))


def _readings(value: Any, place: Seq[int | str]) -> list[tuple[Place, Any]]:
    """All paths that a place may mean, with the value at each."""
    found: list[tuple[Place, Any]] = [((), value)]
    for step in place:
        found += [((*path, step), held[step]) for path, held in found if _has(held, step)]
    return found


def _has(value: Any, step: int | str) -> bool:
    if isinstance(value, dict):
        return step in value
    return isinstance(value, list) and isinstance(step, int) and step < len(value)


def told(errors: Seq[Any], first: Any, body: Any) -> tuple[Place, str]:
    """The place of an error, and what it says.

    Where one of several types was expected, each has its errors: the deepest one counts, as the client meant
    this type, and of equally deep ones all.
    """
    path, said = _told(first, body)
    fork = _fork(first["loc"][1:], path)
    if fork is None:
        return path, said
    prefix = first["loc"][: fork + 1]
    others = [_told(one, body) for one in errors if one["loc"][: fork + 1] == prefix]
    deepest = max((other for other, _ in others), key=len)
    if len(deepest) > len(path):
        path = deepest
    sayings = dict.fromkeys(said for other, said in others if other == path)
    first_said, *more = sayings
    return path, " or ".join([first_said, *(one.removeprefix(_EXPECTED) for one in more)])


def _fork(place: Seq[int | str], path: Place) -> int | None:
    """The number of steps before the first name of a type; None if there is no such name."""
    same = [one == other for one, other in zip(place, path, strict=False)]
    before = same.index(False) if False in same else len(same)
    return before if before < len(place) else None


def _told(error: Any, body: Any) -> tuple[Place, str]:
    """The place of an error, and what it says, in the client's words."""
    kind, place, said = error["type"], error["loc"][1:], str(error["msg"])
    if kind == "missing":
        return written_path(body, place, absent=True), said
    path = written_path(body, place)
    if kind == "extra_forbidden":
        return path, refusal_of(".".join(map(str, path)))
    if kind in _OBJECTS or (kind.startswith("union_tag") and not isinstance(_at(body, path), dict)):
        return path, f"{_EXPECTED}an object"
    if kind == "union_tag_not_found":
        return (*path, "type"), "Field required"
    if kind == "union_tag_invalid":
        return (*path, "type"), f"{_EXPECTED}{error['ctx']['expected_tags']}"
    return path, said


def _at(body: Any, path: Place) -> Any:
    for step in path:
        body = body[step]
    return body


_SMALL = 2**16  # bytes of a body that waits for nothing: it is parsed in the event loop, and not counted
_LONG = 2**20  # bytes of a body after which freed memory is returned
_ROUNDS = 64  # of removing unknown fields, of which a list shows those of one element at a time
_SHOWN = 16  # names in a header
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)
_FORM = "application/x-www-form-urlencoded"  # as curl names what -d sends
IGNORED = "x-outpace-ignored"


class StrictRequest(Request):
    """A request whose JSON is parsed strictly: no NaN, no unpaired surrogates, no deep nesting.

    What ``curl -d`` sends as a form is JSON too, but not from a page: a browser lets one of another origin
    send that without asking the server first.

    Args:
        kind: the type of its body.
    """

    def __init__(self, request: Request, kind: type[Wire]) -> None:
        scope = request.scope
        named = request.headers.get("content-type", _FORM).partition(";")[0].strip().lower()
        if named == _FORM and "origin" not in request.headers:
            others = [one for one in scope["headers"] if one[0] != b"content-type"]
            scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        super().__init__(scope, request.receive, request._send)
        self._kind = kind
        self._bodies: Total = self.app.state.bodies
        self._client, self._counted = CLIENT.get(), 0

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            coding = self.headers.get("content-encoding", "identity")
            if coding.lower() != "identity":
                message = f"a body cannot be read in the encoding {coding}; send it as it is"
                raise Refused(415, message, headers={"Accept-Encoding": "identity"})
            most: int = self.app.state.limits.body
            pieces, size = [], int(self.headers.get("content-length") or 0)
            if size <= most:
                size = 0
                async for piece in self.stream():
                    pieces.append(piece)
                    size += len(piece)
                    if size > most:
                        break
                    self._count(size)
            if size > most:
                message = f"the body has more than {most} bytes; send less, or serve with --max-body"
                raise Refused(413, message, headers={"Connection": "close"})
            self._body = b"".join(pieces)
        return self._body

    def _count(self, size: int) -> None:
        """Count what has arrived of a long body among all that are read."""
        if size > _SMALL:
            if not self._bodies.take(self._client, size - self._counted):
                raise later(503, "the server is reading too many long requests; try again", "overloaded", 1)
            self._counted = size

    def release(self) -> None:
        self._bodies.give(self._client, self._counted)
        self._counted = 0

    async def json(self) -> Any:
        body = await self.body()
        lenient: bool = self.app.state.limits.lenient
        if len(body) <= _SMALL and not lenient:
            return _parsed(body)
        reader: ThreadPoolExecutor = self.app.state.reader
        turns: Turns = self.app.state.readers
        loop, ignored = asyncio.get_running_loop(), list[str]()
        given = ignored if lenient else None
        async with turns.place(self._client):
            found = await loop.run_in_executor(reader, _validated, body, self._kind, given)
        if isinstance(found, Refused):
            raise found
        self.scope.setdefault("state", {})["ignored"] = ignored
        return found


def _parsed(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="none")  # keys may be many
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}", code="invalid_json") from error


def _validated(body: bytes, kind: type[Wire], ignored: list[str] | None) -> Wire | Refused:
    """A body as its type, which FastAPI then takes as it is; runs outside of the event loop.

    A refusal is returned: the traceback of one that is raised would keep what was parsed.
    """
    collects = gc.isenabled()
    gc.disable()  # a body of a million lists is parsed in a third of the time
    try:
        return _as(kind, body, ignored)
    finally:
        if collects:
            gc.enable()
        if len(body) > _LONG:
            return_memory()


def _as(kind: type[Wire], body: bytes, ignored: list[str] | None) -> Wire | Refused:
    try:
        found = _parsed(body)
        check_size(found)
        for _ in range(0 if ignored is None else _ROUNDS):
            try:
                return kind.model_validate(found)
            except ValidationError as error:
                extra = [one["loc"] for one in error.errors() if one["type"] == "extra_forbidden"]
                if ignored is None or not extra:
                    raise
                ignored += [_removed(found, place) for place in extra]
        return kind.model_validate(found)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        return invalid_body([{**one, "loc": ("body", *one["loc"])} for one in errors], found)
    except ValueError as error:
        return Refused(400, str(error))
    except Refused as error:
        return error.with_traceback(None)


def _removed(body: Any, place: Seq[int | str]) -> str:
    path = written_path(body, place)
    holder = body
    for step in path[:-1]:
        holder = holder[step]
    del holder[path[-1]]
    return ".".join(map(str, path))


def ignored_header(names: Seq[str]) -> str:
    """The header that names ignored fields: the first of them, in ASCII."""
    shown = [_UNSAFE.sub("?", name)[:100] for name in names[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def invalid_body(errors: Seq[Any], body: Any) -> Refused:
    """Describe pydantic's errors in a body: the first, or the one that names a kind of content."""
    first = next((one for one in errors if one["type"] == "no_media"), errors[0])
    if len(first["loc"]) < 2:
        message = "the body must be a JSON object, sent as Content-Type: application/json"
        return Refused(400, message, code="invalid_json")
    path, said = told(errors, first, body)
    place = ".".join(map(str, path))
    if said == refusal_of(place):
        return Refused(400, said, place)
    return Refused(400, f"{place}: {said}", str(path[0]))
