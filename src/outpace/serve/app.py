"""The routes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outpace._version import __version__
from outpace.serve import wire
from outpace.serve.admission import Limits
from outpace.serve.chat import chat, template_message
from outpace.serve.completions import completions
from outpace.serve.door import Door, Keys, error_response
from outpace.serve.errors import Refused, later, refusal, unknown_model
from outpace.serve.messages import count, messages
from outpace.serve.page import FILES, File
from outpace.serve.responses import responses
from outpace.serve.service import Service
from outpace.serve.shapes import answer
from outpace.serve.worker import return_memory

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_SMALL = 2**16  # bytes of a body that is parsed in the event loop
_LONG = 2**20  # bytes of a body after which freed memory is returned
_LEFT = 499  # nginx's status for a client that has disconnected, so it is never received


class _Request(Request):
    """A request whose JSON is parsed strictly: no NaN, no unpaired surrogates, no deep nesting.

    Args:
        kind: the type of its body.
    """

    def __init__(self, request: Request, kind: type[wire.Wire]) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._kind = kind
        self._reserved = 0

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            most: int = self.app.state.limits.body
            pieces, size = [], int(self.headers.get("content-length") or 0)
            self._reserve(most if "transfer-encoding" in self.headers else min(size, most))
            if size <= most:
                size = 0
                async for piece in self.stream():
                    pieces.append(piece)
                    size += len(piece)
                    if size > most:
                        break
            if size > most:
                message = f"the body has more than {most} bytes; send less, or serve with --max-body"
                raise Refused(413, message, headers={"Connection": "close"})
            self._body = b"".join(pieces)
        return self._body

    def _reserve(self, size: int) -> None:
        """Count the bytes of the body among those of all that are read.

        Raises:
            Refused: there are too many.
        """
        state = self.app.state
        if state.bodies + size > state.limits.bodies:
            raise later(503, "the server is reading too many long requests; try again", "overloaded", 1)
        state.bodies += size
        self._reserved = size

    def release(self) -> None:
        """End the count of the body's bytes."""
        self.app.state.bodies -= self._reserved
        self._reserved = 0

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _SMALL:
            return _parsed(body)
        reader: ThreadPoolExecutor = self.app.state.reader
        found = await asyncio.get_running_loop().run_in_executor(reader, _validated, body, self._kind)
        if isinstance(found, Refused):
            raise found
        return found


def _parsed(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="none")  # keys may be many
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}", code="invalid_json") from error


def _validated(body: bytes, kind: type[wire.Wire]) -> wire.Wire | Refused:
    """A long body as its type, which FastAPI then takes as it is; runs outside of the event loop.

    A refusal is returned: the traceback of one that is raised would keep what was parsed.
    """
    collects = gc.isenabled()
    gc.disable()  # a body of a million lists is parsed in a third of the time
    try:
        return _as(kind, body)
    finally:
        if collects:
            gc.enable()
        if len(body) > _LONG:
            return_memory()


def _as(kind: type[wire.Wire], body: bytes) -> wire.Wire | Refused:
    try:
        found = _parsed(body)
        wire.check_size(found)
        return kind.model_validate(found)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        return _invalid([{**one, "loc": ("body", *one["loc"])} for one in errors])
    except ValueError as error:
        return Refused(400, str(error))
    except Refused as error:
        return error.with_traceback(None)


class _Route(APIRoute):
    """A route that reads bodies with ``_Request``, and cancels a handler whose client disconnects."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if request.method != "POST":
                return await _unless_gone(request, handle(request))
            strict = _Request(request, _APIS[self.path][1])
            try:
                await strict.body()
                return await _unless_gone(strict, handle(strict))
            finally:
                strict.release()

        return handler


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of a handler, which is cancelled if the client disconnects first."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=_LEFT)
    finally:
        for task in (gone, working):
            task.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- routes ----------------------------------------------------------------------------------------------


def _service(request: Request) -> Service:
    service: Service | None = request.app.state.service
    if service is None:
        raise later(503, "the model is being loaded; try again", "loading", 2)
    return service


def _check_model(service: Service, model: str | None) -> None:
    if model is not None and model not in service.names:
        raise unknown_model(model, service.names)


def _endpoint(api: Callable[..., Awaitable[Response]], kind: type[Any]) -> Callable[..., Awaitable[Response]]:
    """Make a route of ``api(service, body, tenant)``, with a body of this type."""

    async def ask(body: Any, request: Request) -> Response:
        service = _service(request)
        _check_model(service, body.model)
        return await api(service, body, request.state.tenant)

    ask.__annotations__["body"] = kind
    ask.__name__ = api.__name__
    return ask


async def _tokenize(service: Service, body: wire.Tokenize, tenant: str | None) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise Refused(400, "give prompt or messages", "prompt")
    if body.messages is not None and body.add_special_tokens:
        raise Refused(400, "the template adds the special tokens; leave it out", "add_special_tokens")
    if body.prompt is not None and body.add_generation_prompt:
        raise Refused(400, "a prompt has none; give messages, or leave it out", "add_generation_prompt")

    async def read() -> Response:
        if body.prompt is not None:
            tokens = await service.tokens(body.prompt, body.add_special_tokens is not False)
        else:
            turns = await asyncio.to_thread(lambda: [template_message(one) for one in body.messages or ()])
            tokens = await service.conversation(
                turns, add_generation_prompt=body.add_generation_prompt is not False
            )
        return await asyncio.to_thread(written, tokens)

    def written(tokens: list[int]) -> Response:
        texts = service.model.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        found = {"count": len(tokens), "max_model_len": service.defaults.context, "tokens": tokens}
        return answer(found | {"token_strs": texts})

    return await service.work(read)


async def _detokenize(service: Service, body: wire.Detokenize, tenant: str | None) -> Response:
    async def write() -> Response:
        text = await asyncio.to_thread(
            lambda: service.model.tokenizer.decode(service.check_tokens(body.tokens))
        )
        return answer({"prompt": text})

    return await service.work(write)


async def _count(service: Service, body: wire.CountTokens, tenant: str | None) -> Response:
    return answer(await service.work(lambda: count(service, body)))


_APIS: dict[str, tuple[Callable[..., Awaitable[Response]], type[wire.Wire]]] = {
    "/v1/chat/completions": (chat, wire.Chat),
    "/v1/completions": (completions, wire.Completions),
    "/v1/messages": (messages, wire.Messages),
    "/v1/messages/count_tokens": (_count, wire.CountTokens),
    "/v1/responses": (responses, wire.Responses),
    "/tokenize": (_tokenize, wire.Tokenize),
    "/detokenize": (_detokenize, wire.Detokenize),
}


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "outpace",
        "max_model_len": service.defaults.context,
        "drafters": service.drafters,
        "max_running": service.admission.limits.running,
    }


async def _models(request: Request) -> Response:
    service = _service(request)
    return answer({"object": "list", "data": [_card(service, name) for name in service.names]})


async def _model(name: str, request: Request) -> Response:
    service = _service(request)
    _check_model(service, name)
    return answer(_card(service, name))


async def _health(request: Request) -> Response:
    service: Service | None = request.app.state.service
    if service is not None:
        await service.check_health()
    return answer({"status": "ok"})


async def _ready(request: Request) -> Response:
    _service(request).check()
    return answer({"status": "ready"})


async def _version() -> Response:
    return answer({"version": __version__})


async def _metrics(request: Request) -> Response:
    text = await asyncio.to_thread(_service(request).metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


_PAGES: dict[str, Callable[..., Awaitable[Response]]] = {
    "/v1/models": _models,
    "/v1/models/{name:path}": _model,
    "/health": _health,
    "/health/ready": _ready,
    "/version": _version,
    "/metrics": _metrics,
}


def _static(file: File) -> Callable[[], Awaitable[Response]]:
    async def static() -> Response:
        return file.response()

    return static


# -- mistakes --------------------------------------------------------------------------------------------


def _invalid(errors: Sequence[Any]) -> Refused:
    """Describe the first of pydantic's errors in a body, or the one that names a kind of content."""
    first = next((one for one in errors if one["type"] == "not_text"), errors[0])
    place = [str(part) for part in first["loc"][1:]]
    if first["type"] == "extra_forbidden":
        return Refused(400, f"unrecognized request argument: {'.'.join(place)}", ".".join(place) or None)
    if not place:
        message = "the body must be a JSON object, sent as Content-Type: application/json"
        return Refused(400, message, code="invalid_json")
    return Refused(400, f"{'.'.join(place)}: {first['msg']}", place[0])


async def _mistake(request: Request, error: Exception) -> Response:
    """Convert any error before the head of a response to the format of its API."""
    if isinstance(error, RequestValidationError):
        refused = _invalid(error.errors())
    elif isinstance(error, HTTPException):
        cause = error.__cause__  # the cause of FastAPI's error for a body that cannot be parsed
        refused = cause if isinstance(cause, Refused) else Refused(error.status_code, _words(request, error))
        refused.headers = {**(error.headers or {}), **refused.headers}
    elif isinstance(error, ClientDisconnect):
        return Response(status_code=_LEFT)
    else:
        refused = refusal(error)
    return error_response(request.scope, refused)


def _words(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        return f"there is nothing at {request.url.path}"
    if error.status_code == 405:
        return f"{request.url.path} does not take {request.method}"
    return str(error.detail)


# -- the application -------------------------------------------------------------------------------------


def _shapes(path: str) -> dict[str, Any]:
    """The responses of a path in ``/openapi.json``."""
    failure = wire.AnthropicFailure if path.startswith("/v1/messages") else wire.Failure
    errors = {status: {"description": "An error", "model": failure} for status in ("4XX", "5XX")}
    return {"response_class": Response, "responses": errors}


def make_app(
    keys: Keys,
    limits: Limits,
    origins: Sequence[str] = (),
    opening: Callable[[], Awaitable[Service | None]] | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Make the application; ``app.state.service`` is its service, None while the model is being loaded.

    Args:
        origins: origins whose pages may send requests from a browser.
        opening: makes the service, once the event loop runs; returns None if that failed.
        tracer: OpenTelemetry tracer that gets a span of each request.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def load() -> None:
            if opening is not None:
                app.state.service = await opening()

        loading = asyncio.ensure_future(load())
        yield
        loading.cancel()
        if app.state.service is not None:
            await app.state.service.close()

    app = FastAPI(title="outpace", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service, app.state.limits, app.state.bodies = None, limits, 0
    app.state.reader = ThreadPoolExecutor(1, "outpace-bodies")  # one, since parsing holds Python's lock
    router = APIRouter(route_class=_Route)
    for path, (api, kind) in _APIS.items():
        router.add_api_route(path, _endpoint(api, kind), methods=["POST"], **_shapes(path))
    for path, page in _PAGES.items():
        router.add_api_route(path, page, methods=["GET"], **_shapes(path))
    for path, file in FILES.items():
        router.add_api_route(path, _static(file), methods=["GET"], response_class=Response)
    app.include_router(router)
    for mistake in (RequestValidationError, HTTPException, ClientDisconnect, Refused, Exception):
        app.add_exception_handler(mistake, _mistake)
    app.add_middleware(Door, keys=keys, tracer=tracer)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
