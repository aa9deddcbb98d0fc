"""The server as an application of Ray Serve, on several machines: the same app and engine in every replica.

    serve run outpace.serve.ray:build model=NAME max_replicas=4

Clients connect to an entry, which reads each request and passes it to a replica; Ray Serve starts and stops
replicas by the number of requests in progress, each with its requested devices, and replaces unhealthy ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import from_json
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import MultiplexMixin, PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.core import OutpaceError
from outpace.embedded import nano_path
from outpace.engine.engine import Engine
from outpace.engine.fair import FairLock
from outpace.engine.usual import usual_drafter
from outpace.loading import Loaded, load
from outpace.loading.apart import loaded_apart
from outpace.serve.admission import Limits
from outpace.serve.auth import OPEN, Keys
from outpace.serve.engine import make_engine, rooms
from outpace.serve.errors import Refused, error_response, later, unknown_model
from outpace.serve.formats import json_response, sse
from outpace.serve.hosted import Hosted
from outpace.serve.pool import spare
from outpace.serve.replicas import ranks, read
from outpace.serve.totals import Turns

_TRIES = 3  # of a request whose replicas die before they answer
_SCOPE = {"type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path",
          "headers", "client", "server"}  # fmt: skip


def _json(text: Any) -> Any:
    """The options that the command line passes as JSON."""
    return from_json(text) if isinstance(text, str) else text


class Config(BaseModel):
    """Configuration of an application, from the command line or a file.

    Attributes:
        model, drafter, dtype, trust_remote_code: as for ``outpace serve``.
        name: name of the model in requests; by default its own name.
        models: name in requests -> model, in place of ``model``, for several; in JSON on a command line. A
            replica loads one on its first request.
        loaded: maximum number of models in a replica; the least recently used one is unloaded.
        api_keys: keys, separated by commas, one of which each request must send; empty accepts all requests.
        max_running, max_waiting, max_wait, memory, prefix_cache: limits of each replica, as for
            ``outpace serve``; with several models, of each of them.
        refuse_long_answers, lenient: as for ``outpace serve``.
        min_replicas, max_replicas: bounds of the number of replicas.
        target_ongoing: target number of requests in progress per replica.
        scale_up_after, scale_down_after: seconds for which more or fewer replicas must be wanted.
        beginning: requests whose texts have these many first characters in common go to the same replica
            while it is not crowded; 0 distributes them by load alone.
        entries: number of entries.
        cpus, gpus: number of these per replica.
        drain: seconds for a replica to finish its requests.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    drafter: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    name: str | None = None
    models: Annotated[dict[str, str], BeforeValidator(_json)] = Field(default_factory=dict)
    loaded: int = Field(1, ge=1)
    api_keys: str = ""
    max_running: int = Field(32, ge=1)
    max_waiting: int = Field(256, ge=0)
    max_wait: float = Field(60.0, ge=0)
    memory: float = Field(0.9, gt=0)
    prefix_cache: int | None = Field(None, ge=0)
    refuse_long_answers: bool = False
    lenient: bool = False
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_ongoing: float = Field(16.0, gt=0)
    scale_up_after: float = Field(30.0, ge=0)
    scale_down_after: float = Field(600.0, ge=0)
    beginning: int = Field(256, ge=0)
    entries: int = Field(1, ge=1)
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    drain: float = Field(30.0, ge=0)

    @property
    def limits(self) -> Limits:
        return Limits(
            self.max_running,
            self.max_waiting,
            self.max_wait,
            cut=not self.refuse_long_answers,
            lenient=self.lenient,
        )

    @property
    def keys(self) -> Keys:
        return Keys(key.strip() for key in self.api_keys.split(",") if key.strip())

    def check(self) -> None:
        """Check options against each other.

        Raises:
            OutpaceError: two contradict each other; the message names them.
        """
        if self.max_replicas < self.min_replicas:
            raise OutpaceError(
                f"max_replicas ({self.max_replicas}) must be at least min_replicas ({self.min_replicas})"
            )
        if self.models and (self.model is not None or self.name is not None):
            raise OutpaceError("models names several models; leave out model and name")
        if self.loaded > 1 and not self.models:
            raise OutpaceError("loaded counts models of a replica; name several in models")


class PrefixRouter(MultiplexMixin, RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Router of an entry's requests: those that begin alike go to the same replica.

    A request's first argument is its key; without one, it goes to the replica with the fewest requests.
    """

    def initialize_state(self, enough: float) -> None:
        """Take the ``request_router_kwargs``; Ray Serve calls this once.

        Args:
            enough: requests in progress up to which a replica is not crowded.
        """
        self._enough = enough

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are tried; those of an inner list are equally good."""
        groups = [candidate_replicas]
        if pending_request is None:
            return groups
        if model := pending_request.metadata.multiplexed_model_id:
            groups = self.rank_replicas_via_multiplex(candidate_replicas, model)
        key = pending_request.args[0]
        if not key:
            return groups
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(one.replica_id) or 0 for name, one in replicas.items()}
        names = [[one.replica_id.unique_id for one in group] for group in groups]
        return [[replicas[name]] for name in ranks(key, names, loads, self._enough)]


class Ingress:
    """ASGI application that passes each request to a replica, and the replica's messages to the client.

    A request whose replica dies before the answer has begun is given to another one.

    Args:
        replicas: Ray Serve's handle of the replicas.
        names: names of the models; the first one is used if a request names none.
    """

    def __init__(self, config: Config, replicas: Any, names: list[str]) -> None:
        self._config, self._replicas, self._names = config, replicas, names
        self._keys, self._most = config.keys, config.limits.body
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a WebSocket, which no route takes
            raise OutpaceError(f"there is nothing for {scope['type']} here")
        try:
            if scope["path"] not in OPEN:
                self._keys.tenant(Headers(scope=scope))
            body = await self._body(receive)
            # A long body would keep all others from the event loop.
            named, beginning = await asyncio.to_thread(read, body, self._config.beginning)
            model = self._model(scope["path"], named)
        except Refused as refused:
            await error_response(scope["path"], refused)(scope, receive, send)
            return
        if model is None:
            await json_response({"object": "list", "data": self._cards()})(scope, receive, send)
            return
        passed = {name: value for name, value in scope.items() if name in _SCOPE}
        key = f"{model}\0{beginning}" if beginning else ""
        for rest in reversed(range(_TRIES)):
            if await self._pass(model, key, passed, body, send, last=not rest):
                return

    async def _body(self, receive: Receive) -> bytes:
        """A request's body, cut where the app refuses it for its length."""
        pieces, size = [], 0
        while size <= self._most:
            message = await receive()
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if not message.get("more_body", False):
                break
        return b"".join(pieces)

    def _model(self, path: str, named: str | None) -> str | None:
        """The model that a request is for; None for the list of all."""
        if len(self._names) == 1:  # its app checks the name
            return self._names[0]
        if path == "/v1/models":
            return None
        if path.startswith("/v1/models/"):
            named = path.removeprefix("/v1/models/")
        if named is not None and named not in self._names:
            raise unknown_model(named, self._names)
        return named or self._names[0]

    def _cards(self) -> list[dict[str, Any]]:
        common = {"object": "model", "created": self._created, "owned_by": "outpace"}
        return [{"id": name} | common for name in self._names]

    async def _pass(
        self, model: str, key: str, scope: dict[str, Any], body: bytes, send: Send, last: bool
    ) -> bool:
        """Answer a request from a replica; False if the replica died before the answer began."""
        multiplexed = model if len(self._names) > 1 else ""
        handle = self._replicas.options(stream=True, multiplexed_model_id=multiplexed)
        messages = handle.answer.remote(key, model, scope, body)
        begun, streams = False, False
        try:
            async for message in messages:
                begun = True
                if message["type"] == "http.response.start":
                    streams = any(b"text/event-stream" in value for _, value in message["headers"])
                await send(message)
            return True
        except RayActorError:
            lost = later(503, "the replica of this request has failed; repeat it", "replica_failed", 1)
            if not begun and not last:
                return False
            if not begun:
                await error_response(scope["path"], lost)(scope, _no_more, send)
            elif streams:
                await send({"type": "http.response.body", "body": sse(lost.openai())})
            else:
                raise
            return True
        except asyncio.CancelledError:  # the client has disconnected
            messages.cancel()
            raise


async def _no_more() -> Message:
    raise RuntimeError("a response reads nothing")


class Replica:
    """A replica of the deployment behind the entries: ready when its first model is loaded.

    Args:
        models: name in requests -> model; the first one is loaded at the start.
    """

    async def __init__(self, config: Config, models: dict[str, str | None]) -> None:  # type: ignore[misc]
        self._config, self._models = config, models
        self._hosted: dict[str, Hosted] = {}
        # Of all models: while one is loaded, torch's default dtype is not theirs.
        self._steps, self._jobs = FairLock(), Turns(spare(int(config.cpus)))
        if config.gpus == 0:
            torch.set_num_threads(max(1, int(config.cpus)))
        await self.hosted(next(iter(models)))

    async def hosted(self, name: str) -> Hosted:
        config = self._config
        model, engine = await loaded_apart(partial(self._load, self._models[name]))
        hosted = Hosted(model, engine, config.limits, [name], config.keys, self._steps, self._jobs)

        async def unload() -> None:
            self._hosted.pop(name)
            await hosted.close()

        # Ray Serve calls this attribute of an object to unload it; Python itself would call its class's.
        vars(hosted)["__del__"] = unload
        self._hosted[name] = hosted
        return hosted

    def _load(self, model: str | None) -> tuple[Loaded, Engine]:
        config = self._config
        trust = config.trust_remote_code
        with self._steps:
            loaded = load(model, config.dtype, trust_remote_code=trust, seq2seq="images")
            loaded.target.release()
            drafter = config.drafter or usual_drafter(loaded.target)
            room = rooms(config.memory, config.prefix_cache)
            return loaded, make_engine(loaded, drafter, config.limits, ready=True, **room)

    async def answer(self, key: str, model: str, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """The ASGI messages in answer to a request.

        Args:
            key: what requests that begin alike have in common; the router reads it.
            model: the model's name.
            scope: the request's ASGI scope.
            body: its body.
        """
        del key
        hosted = await self.hosted(model)
        async for message in hosted.answer(scope, body):
            yield message

    async def check_health(self) -> None:
        """Raise what keeps an engine from answering, so that Ray Serve replaces the replica."""
        for hosted in [*self._hosted.values()]:
            try:
                await hosted.service.check_health()
            except Refused as error:
                raise RuntimeError(str(error)) from hosted.service.engine.failed


def build(config: Config) -> Application:
    """An application for ``serve.run`` or ``serve run outpace.serve.ray:build``.

    Raises:
        OutpaceError: options that contradict each other.
    """
    config.check()
    own = config.name or (config.model or nano_path().name).rstrip("/").rsplit("/", 1)[-1]
    models: dict[str, str | None] = {**config.models} if config.models else {own: config.model}

    class Outpace(Replica):
        hosted = serve.multiplexed(max_num_models_per_replica=config.loaded)(Replica.hosted)

    def entry() -> ASGIApp:
        replicas = serve.get_deployment_handle("outpace", serve.get_replica_context().app_name)
        return Starlette(routes=[Mount("/", Ingress(config, replicas, list(models)))])

    replicas = serve.deployment(
        Outpace,
        name="outpace",
        max_ongoing_requests=config.max_running + config.max_waiting,
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        autoscaling_config={
            "min_replicas": config.min_replicas,
            "max_replicas": config.max_replicas,
            "target_ongoing_requests": config.target_ongoing,
            "upscale_delay_s": config.scale_up_after,
            "downscale_delay_s": config.scale_down_after,
        },
        request_router_config=RequestRouterConfig(
            request_router_class="outpace.serve.ray:PrefixRouter",
            request_router_kwargs={"enough": config.target_ongoing},
        ),
        health_check_period_s=5,
        graceful_shutdown_timeout_s=config.drain,
    )
    entries = serve.deployment(
        serve.ingress(entry)(),
        name="entry",
        num_replicas=config.entries,
        max_ongoing_requests=config.max_replicas * (config.max_running + config.max_waiting),
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain,
    )
    application: Application = entries.bind(replicas.bind(config, models))
    return application
