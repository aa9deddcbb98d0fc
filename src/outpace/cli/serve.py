"""``outpace serve``: an HTTP server with OpenAI's API."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import completing, screen
from outpace.cli import options as o
from outpace.cli.app import app, guarded
from outpace.cli.given import PlaceOptions, StepOptions, taking
from outpace.cli.observing import Attachment, attached, observer_of
from outpace.cli.parts import ModelSource, profiled
from outpace.cli.several import MOST, Several, chosen
from outpace.core import OutpaceError, need, uncollected
from outpace.names import read_device_map
from outpace.serve.listening import listen

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from outpace.engine.engine import Engine
    from outpace.loading import Loaded
    from outpace.serve.admission import Limits
    from outpace.serve.auth import Keys
    from outpace.serve.router import Router
    from outpace.serve.server import Options, Server
    from outpace.serve.service import Service

API_KEYS = "OUTPACE_API_KEYS"

Models = Annotated[
    list[str] | None,
    o.model_option(
        "--model",
        "-m",
        metavar="MODEL",
        autocompletion=completing.models,
        help="Hub name or folder, smollm2 (see `outpace pull`), or a .gguf file or owner/name:QUANT. "
        "Default: the embedded model. Repeatable, also as NAME=MODEL; or a folder of models: each is loaded "
        "when a request first names it.",
    ),
]
_server = partial(typer.Option, rich_help_panel="Server")
_limits = partial(typer.Option, rich_help_panel="Limits")

Host = Annotated[str, _server("--host", metavar="ADDRESS", help="Address to listen on.")]
Port = Annotated[
    int, _server("--port", metavar="PORT", help="Port to listen on; 0 takes a free one.", min=0, max=65535)
]
Names = Annotated[
    list[str] | None,
    _server(
        "--served-model-name",
        metavar="NAME",
        help="The model's name for clients; repeatable. Default: its name, or the last part of its folder.",
    ),
]
KeysFile = Annotated[
    Path | None,
    _server(
        "--api-keys",
        metavar="FILE",
        help="File of keys, one per line; each request must send one of them. "
        f"(Or {API_KEYS}, separated by commas.)",
    ),
]
Origins = Annotated[
    list[str] | None,
    _server("--cors-origin", metavar="URL", help="Allow requests from pages of this origin; repeatable."),
]
Drain = Annotated[
    float, _server("--drain", metavar="SECONDS", help="Seconds for requests to finish after SIGTERM.", min=0)
]
NoLog = Annotated[bool, _server("--no-access-log", help="Do not log requests.")]
Endpoint = Annotated[
    str | None,
    _server(
        "--otlp-endpoint",
        metavar="URL",
        help="Send a span of each request to this collector (OTLP over HTTP), as in "
        "http://localhost:4318/v1/traces. Needs outpace[otel].",
    ),
]
Others = Annotated[
    list[str] | None,
    o.drafter_option(
        "--also",
        metavar="NAME=SPEC",
        help="A further drafter, which requests select by its name; repeatable. Those that need nothing "
        "are there by their own names.",
    ),
]
MaxRunning = Annotated[int, _limits("--max-running", metavar="N", help="Sequences decoded at once.", min=1)]
MaxWaiting = Annotated[
    int,
    _limits(
        "--max-waiting", metavar="N", help="Maximum of waiting requests; beyond it, requests get 429.", min=0
    ),
]
MaxWait = Annotated[
    float,
    _limits(
        "--max-wait", metavar="SECONDS", help="Maximum seconds that a request waits; then it gets 503.", min=0
    ),
]
MaxBody = Annotated[
    float, _limits("--max-body", metavar="MIB", help="Maximum size of a request's body in MiB.", min=0.001)
]
Memory = Annotated[
    float,
    _limits(
        "--memory",
        metavar="GIB",
        help="GiB for keys and values, or, below 1, a share of free memory.",
        min=0.001,
    ),
]
PrefixCache = Annotated[
    int | None,
    _limits(
        "--prefix-cache",
        metavar="MIB",
        help="MiB for the prefix cache of common prompt prefixes; 0 for none. "
        "Default: a tenth of free memory.",
        min=0,
    ),
]
PrefixStore = Annotated[
    Path | None,
    _limits(
        "--prefix-store",
        metavar="FOLDER",
        help="Folder that keeps the prefix cache from one start to the next, users' prompts included.",
    ),
]
ModelsMax = Annotated[
    int | None,
    _limits(
        "--models-max",
        metavar="N",
        help="Of several models, how many are loaded at once; for another, the one that has been idle for "
        f"longest is unloaded. Default: {MOST}.",
        min=1,
        show_default=False,
    ),
]
ModelsIdle = Annotated[
    float | None,
    _limits(
        "--models-idle",
        metavar="SECONDS",
        help="Unload a model after this time without a request. Default: only when others need its memory.",
        min=0,
        show_default=False,
    ),
]
RefuseLong = Annotated[
    bool,
    _limits(
        "--refuse-long-answers",
        help="Refuse a request for more tokens than its prompt leaves of the context, instead of cutting its "
        "answer.",
    ),
]
Lenient = Annotated[
    bool,
    _limits(
        "--lenient",
        help="Ignore unknown fields of requests, and name them in the header x-outpace-ignored.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """What is served, and by which drafters."""

    model: Models = None
    drafter: o.DefaultDrafterSpec = ""
    also: Others = None
    profile: o.ProfileFile = None
    adaptive: o.Adaptive = None
    observer: o.ObserverSpec = ""

    def others(self) -> dict[str, str]:
        found = dict[str, str]()
        for one in self.also or ():
            name, equals, spec = one.partition("=")
            if not (name and equals and spec):
                raise OutpaceError(f"--also takes NAME=SPEC, as in copy=prompt_lookup; not {one!r}")
            found[name] = spec
        return found


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServedOptions, PlaceOptions, StepOptions):
    """The options of ``outpace serve``."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    served_model_name: Names = None
    api_keys: KeysFile = None
    cors_origin: Origins = None
    drain: Drain = 30.0
    no_access_log: NoLog = False
    otlp_endpoint: Endpoint = None
    max_running: MaxRunning = 32
    max_waiting: MaxWaiting = 256
    max_wait: MaxWait = 60.0
    max_body: MaxBody = 4.0
    memory: Memory = 0.8
    prefix_cache: PrefixCache = None
    prefix_store: PrefixStore = None
    models_max: ModelsMax = None
    models_idle: ModelsIdle = None
    refuse_long_answers: RefuseLong = False
    lenient: Lenient = False

    def of_one(self) -> dict[str, Any]:
        """The options that are for one model that is loaded at the start."""
        return {
            "--profile": self.profile,
            "--device-map": self.device_map,
            "--parallel": self.parallel,
            "--observer": self.observer,
            "--served-model-name": self.served_model_name,
        }

    def limits(self) -> Limits:
        from outpace.serve.admission import Limits

        return Limits(
            self.max_running,
            self.max_waiting,
            self.max_wait,
            body=int(self.max_body * 2**20),
            cut=not self.refuse_long_answers,
            lenient=self.lenient,
        )

    def of_server(self, keys: Keys, limits: Limits) -> Options:
        from outpace.serve.server import Options

        names, origins, tracer = (
            self.served_model_name or (),
            self.cors_origin or (),
            _tracer(self.otlp_endpoint),
        )
        return Options(names, self.drain, origins, tracer, keys, limits, self.prefix_store)


@app.command(epilog="Example: outpace serve --drafter prompt_lookup --port 8000")
@guarded
@taking(ServeOptions)
def serve(given: ServeOptions) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    began, others = time.monotonic(), given.others()
    source = given.source(None, seq2seq="images", options=given.steps(), releases=not given.observer)
    keeps = given.models_max is not None or given.models_idle is not None
    source, several = chosen(given.model or [], keeps, source, given.drafter, others, given.adaptive)
    keys = _checked(given, source, several, [given.drafter, *others.values()])
    watching = observer_of(given.observer, given.parallel)
    source = replace(source, place=given.place(source.model))
    with listen(given.host, given.port) as listener, ExitStack() as learners:  # before torch is imported
        with uncollected():
            from outpace.serve.server import Server

            limits = given.limits()
            options = given.of_server(keys, limits)
        ready = partial(_banner, host=given.host, listener=listener, keys=len(options.keys), began=began)
        load: Callable[[], Any] = partial(_one, given, source, watching, learners, limits)
        if several is not None:
            room = given.models_max or MOST, given.memory, given.prefix_cache
            load = partial(several.plan, limits, room, given.models_idle, given.prefix_store)
        _run(Server(options, load, ready), listener, not given.no_access_log)


def _one(
    given: ServeOptions,
    source: ModelSource,
    watching: Attachment | None,
    learners: ExitStack,
    limits: Limits,
) -> tuple[Loaded, Engine]:
    """Load the model of a server that has one, and make its engine."""
    from outpace.serve.engine import make_engine, rooms

    loaded, chosen = profiled(source, given.drafter, given.profile, "match")
    learner = learners.enter_context(attached(watching, loaded, chosen.spec))
    own = chosen.drafter if learner is None else learner.drafter
    adaptive = "auto" if given.adaptive is None else given.adaptive
    more = {"adaptive": adaptive, **rooms(given.memory, given.prefix_cache)}
    return loaded, make_engine(loaded, own, limits, given.others(), learner, True, **more)


def _tracer(endpoint: str | None) -> Tracer | None:
    """The tracer of requests, if their spans are sent anywhere."""
    from outpace.serve.telemetry import tracer_to

    return tracer_to(endpoint) if endpoint else None


def _checked(given: ServeOptions, source: ModelSource, several: Several | None, specs: list[str]) -> Keys:
    """Refuse missing extras, unknown names, and options of one model for several; return the server's keys.

    Imports no torch.
    """
    need("serve", "outpace serve")
    if given.otlp_endpoint:
        need("otel", "--otlp-endpoint")
    for spec in specs:
        source.check_names(spec)
    if several is not None:
        several.check(given.of_one())
    if given.device_map is not None:
        read_device_map(given.device_map)
    from outpace.serve.auth import Keys

    return Keys.read(given.api_keys, os.environ.get(API_KEYS, ""))


def _run(server: Server, listener: socket, access: bool) -> None:
    """Serve; raise what that ended with as a user's mistake: one line, and an exit code other than 0."""
    _log(access)
    server.run(sockets=[listener])
    error = server.error
    if isinstance(error, OutpaceError | OSError):
        raise error
    if error is not None:
        raise OutpaceError(f"the server failed: {error!r}") from error


def _banner(served: Service | Router, host: str, listener: socket, keys: int, began: float) -> None:
    address = f"http://{host if ':' not in host else f'[{host}]'}:{listener.getsockname()[1]}"
    from outpace.serve.service import Service

    if isinstance(served, Service):
        _of_one(served, address)
    else:
        _of_several(served, address)
    screen.note(f"  keys      {keys or 'none: requests need no key'}")
    screen.note(f"  ready after {time.monotonic() - began:.1f} s; Ctrl-C ends it", style="dim")


def _of_several(router: Router, address: str) -> None:
    """Print what a host of several models serves."""
    known = [model.known for model in router.models.values()]
    screen.note(f"outpace serves {len(known)} models, each loaded when a request first names it")
    screen.note(f"  API       {address}/v1")
    screen.note(f"  page      {address}/")
    for one in known:
        total = router.room.of(one.device)
        large = total is not None and one.bytes > total
        size = f"{one.bytes / 2**30:.1f} GiB{', more than there is here' if large else ''}"
        screen.note(f"  model     {one.name} ({size})")


def _of_one(service: Service, address: str) -> None:
    """Print what the service of one model is."""
    model, quantised = service.model, service.model.target.quantised
    weights = f", weights in {quantised}" if quantised else ""
    screen.note(f"outpace serves {service.name} ({model.dtype}{weights} on {model.device})")
    screen.note(f"  API       {address}/v1")
    screen.note(f"  page      {address}/")
    screen.note(f"  drafters  {', '.join(service.drafters.names)}")
    if service.exactness:
        screen.note(f"  not exact: near-ties may flip ({service.exactness['exactness']['reason']})")
    size, rows = service.prefixes
    screen.note(
        f"  prefixes  {f'{size / 2**30:.1f} GiB, {rows:,} tokens of prompts' if size else 'none are kept'}"
    )
    for reason in service.slow:
        screen.note(f"  slower than it could be: {reason}")


def _log(access: bool) -> None:
    """Log requests as lines of JSON, and errors as text, on standard error."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("outpace.access")
    log.propagate, log.level = False, logging.INFO
    log.handlers = [lines] if access else [logging.NullHandler()]
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
