"""The routes: each path with its handler and the type of its body, and the application that has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outpace._version import __version__
from outpace.serve.admission import Limits
from outpace.serve.auth import Keys
from outpace.serve.body import IGNORED, StrictRequest, ignored_header, invalid_body
from outpace.serve.chat import Chat, Conversation, chat, template_message
from outpace.serve.completions import Completions, completions
from outpace.serve.continuing import prompt_of
from outpace.serve.errors import Refused, error_response, later, refusal, unknown_model
from outpace.serve.fields import Failure, ModelName, Tokens, Wire
from outpace.serve.formats import json_response
from outpace.serve.host import Host
from outpace.serve.infill import Infill, infill
from outpace.serve.messages import count_tokens, messages
from outpace.serve.messages_body import AnthropicFailure, CountTokens, Messages
from outpace.serve.middleware import Middleware
from outpace.serve.playground import FILES, File
from outpace.serve.responses import responses
from outpace.serve.responses_body import Responses
from outpace.serve.service import Service
from outpace.serve.totals import Total, Turns


class Tokenize(Wire):
    """``POST /tokenize``: a text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    add_special_tokens: bool | None = None  # by default to a prompt, since templates contain them
    add_generation_prompt: bool | None = None  # of messages, by default
    continue_final_message: bool | None = None
    return_token_strs: bool = False


class Detokenize(Wire):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Tokens


async def tokenize(service: Service, body: Tokenize, tenant: str | None) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise Refused(400, "give prompt or messages", "prompt")
    if body.messages is not None and body.add_special_tokens:
        raise Refused(400, "the template adds the special tokens; leave it out", "add_special_tokens")
    for name in ("add_generation_prompt", "continue_final_message"):
        if body.prompt is not None and getattr(body, name):
            raise Refused(400, "it is of messages; give them, or leave it out", name)

    async def read() -> Response:
        if body.prompt is not None:
            tokens = await service.prompts.tokens(body.prompt, body.add_special_tokens is not False)
        else:
            turns, _ = await asyncio.to_thread(
                lambda: service.dialogue.prepared([template_message(one) for one in body.messages or ()], ())
            )
            tokens = (await prompt_of(service, body, turns, {})).tokens
        return await asyncio.to_thread(written, tokens)

    def written(tokens: list[int]) -> Response:
        texts = service.model.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        found = {"count": len(tokens), "max_model_len": service.defaults.context, "tokens": tokens}
        return json_response(found | {"token_strs": texts})

    return await service.work(read)


async def detokenize(service: Service, body: Detokenize, tenant: str | None) -> Response:
    async def write() -> Response:
        text = await asyncio.to_thread(
            lambda: service.model.tokenizer.decode(service.prompts.check_tokens(body.tokens))
        )
        return json_response({"prompt": text})

    return await service.work(write)


if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_LEFT = 499  # nginx's status for a client that has disconnected, so it is never received


class _Route(APIRoute):
    """A route that reads bodies with ``StrictRequest``, and cancels a handler whose client disconnects."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if request.method != "POST":
                return await _unless_gone(request, handle(request))
            strict = StrictRequest(request, _BODIES[self.path])
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


def _host(request: Request) -> Host:
    host: Host | None = request.app.state.service
    if host is None:
        raise later(503, "the model is being loaded; try again", "loading", 2)
    return host


def _endpoint(api: Callable[..., Awaitable[Response]], kind: type[Any]) -> Callable[..., Awaitable[Response]]:
    """Make a route of ``api(service, body, tenant)``, with a body of this type."""

    async def endpoint(body: Any, request: Request) -> Response:
        async with _host(request).use(body.model) as service:
            response = await api(service, body, request.state.tenant)
        if ignored := getattr(request.state, "ignored", None):
            response.headers[IGNORED] = ignored_header(ignored)
        return response

    endpoint.__annotations__["body"] = kind
    endpoint.__name__ = api.__name__
    return endpoint


_APIS: dict[str, tuple[Callable[..., Awaitable[Response]], type[Wire]]] = {
    "/v1/chat/completions": (chat, Chat),
    "/v1/completions": (completions, Completions),
    "/v1/messages": (messages, Messages),
    "/v1/messages/count_tokens": (count_tokens, CountTokens),
    "/v1/responses": (responses, Responses),
    "/infill": (infill, Infill),
    "/tokenize": (tokenize, Tokenize),
    "/detokenize": (detokenize, Detokenize),
}


async def _load(body: ModelName, request: Request) -> Response:
    async with _host(request).use(body.model):
        return json_response({"success": True})


async def _unload(body: ModelName, request: Request) -> Response:
    await _host(request).unload(body.model)
    return json_response({"success": True})


# Of llama-server's router.
_MANAGING: dict[str, Callable[..., Awaitable[Response]]] = {"/models/load": _load, "/models/unload": _unload}
_BODIES: dict[str, type[Wire]] = {path: kind for path, (_, kind) in _APIS.items()} | dict.fromkeys(
    _MANAGING, ModelName
)


async def _models(request: Request) -> Response:
    return json_response({"object": "list", "data": _host(request).cards()})


async def _model(name: str, request: Request) -> Response:
    cards = {card["id"]: card for card in _host(request).cards()}
    if name not in cards:
        raise unknown_model(name, cards)
    return json_response(cards[name])


async def _health(request: Request) -> Response:
    host: Host | None = request.app.state.service
    found = {} if host is None else await host.health()
    return json_response({"status": "ok", **found})


async def _ready(request: Request) -> Response:
    _host(request).check()
    return json_response({"status": "ready"})


async def _version() -> Response:
    return json_response({"version": __version__})


async def _metrics(request: Request) -> Response:
    text = await asyncio.to_thread(_host(request).metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


_PAGES: dict[str, Callable[..., Awaitable[Response]]] = {
    "/v1/models": _models,
    "/models": _models,
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


async def _mistake(request: Request, error: Exception) -> Response:
    """Convert any error before the head of a response to the format of its API."""
    if isinstance(error, RequestValidationError):
        refused = invalid_body(error.errors(), error.body)
    elif isinstance(error, HTTPException):
        cause = error.__cause__  # the cause of FastAPI's error for a body that cannot be parsed
        refused = cause if isinstance(cause, Refused) else Refused(error.status_code, _words(request, error))
        refused.headers = {**(error.headers or {}), **refused.headers}
    elif isinstance(error, ClientDisconnect):
        return Response(status_code=_LEFT)
    else:
        refused = refusal(error)
    return error_response(request.scope["path"], refused)


def _words(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        return f"there is nothing at {request.url.path}"
    if error.status_code == 405:
        return f"{request.url.path} does not take {request.method}"
    return str(error.detail)


# -- the application -------------------------------------------------------------------------------------


def _documented(path: str) -> dict[str, Any]:
    """The responses of a path in ``/openapi.json``."""
    failure = AnthropicFailure if path.startswith("/v1/messages") else Failure
    errors = {status: {"description": "An error", "model": failure} for status in ("4XX", "5XX")}
    return {"response_class": Response, "responses": errors}


def make_app(
    keys: Keys,
    limits: Limits,
    origins: Sequence[str] = (),
    opening: Callable[[], Awaitable[Host | None]] | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Make the application; ``app.state.service`` is its host, None while its only model is being loaded.

    Args:
        origins: origins whose pages may send requests from a browser.
        opening: makes the host, once the event loop runs; returns None if that failed.
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
    app.state.service, app.state.limits = None, limits
    app.state.bodies, app.state.readers = Total(limits.bodies, limits.body), Turns(1)
    app.state.reader = ThreadPoolExecutor(1, "outpace-bodies")  # one, since parsing holds Python's lock
    router = APIRouter(route_class=_Route)
    for path, (api, kind) in _APIS.items():
        router.add_api_route(path, _endpoint(api, kind), methods=["POST"], **_documented(path))
    for path, manage in _MANAGING.items():
        router.add_api_route(path, manage, methods=["POST"], **_documented(path))
    for path, page in _PAGES.items():
        router.add_api_route(path, page, methods=["GET"], **_documented(path))
    for path, file in FILES.items():
        router.add_api_route(path, _static(file), methods=["GET"], response_class=Response)
    app.include_router(router)
    for mistake in (RequestValidationError, HTTPException, ClientDisconnect, Refused, Exception):
        app.add_exception_handler(mistake, _mistake)
    app.add_middleware(Middleware, keys=keys, tracer=tracer)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
