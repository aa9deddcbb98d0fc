"""``outpace serve``: an HTTP server with OpenAI's API."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import completing, screen
from outpace.cli import options as o
from outpace.cli.app import app, guarded
from outpace.cli.observing import Attachment, attached, observer_of
from outpace.cli.parts import Source, profiled, steps
from outpace.cli.place import place_of
from outpace.cli.several import MOST, Several, chosen
from outpace.core import OutpaceError, need
from outpace.names import read_device_map
from outpace.serve.listening import listen

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from outpace.engine.engine import Engine
    from outpace.loading import Loaded
    from outpace.loading.placement import Place
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


@app.command(epilog="Example: outpace serve --drafter prompt_lookup --port 8000")
@guarded
def serve(
    model: Models = None,
    drafter: o.DefaultDrafterSpec = "",
    also: Others = None,
    profile: o.ProfileFile = None,
    adaptive: o.Adaptive = None,
    device: o.Device = None,
    device_map: o.DeviceMap = None,
    parallel: o.Parallel = None,
    parallel_timeout: o.ParallelTimeout = 120.0,
    observer: o.ObserverSpec = "",
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    llamacpp: o.LlamaCpp = "",
    backend: o.Backend = "auto",
    quantise: o.Quantise = None,
    stock: o.Stock = False,
    threads: o.Threads = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: Names = None,
    api_keys: KeysFile = None,
    cors_origin: Origins = None,
    drain: Drain = 30.0,
    no_access_log: NoLog = False,
    otlp_endpoint: Endpoint = None,
    max_running: MaxRunning = 32,
    max_waiting: MaxWaiting = 256,
    max_wait: MaxWait = 60.0,
    max_body: MaxBody = 4.0,
    memory: Memory = 0.8,
    prefix_cache: PrefixCache = None,
    prefix_store: PrefixStore = None,
    models_max: ModelsMax = None,
    models_idle: ModelsIdle = None,
    refuse_long_answers: RefuseLong = False,
    lenient: Lenient = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    began, others, step = time.monotonic(), _others(also or []), steps(quantise, stock, bool(observer))
    source = Source(None, device, dtype, trust_remote_code, llamacpp, "images", step, backend)
    keeps = models_max is not None or models_idle is not None
    source, several = chosen(model or [], keeps, source, drafter, others, adaptive)
    single: dict[str, Any] = {"--profile": profile, "--device-map": device_map, "--parallel": parallel}
    single |= {"--observer": observer, "--served-model-name": served_model_name}
    keys = _checked(source, several, single, [drafter, *others.values()], otlp_endpoint, api_keys)
    watching = observer_of(observer, parallel)
    place = place_of(device, device_map, parallel, parallel_timeout, source.model, dtype, trust_remote_code)
    with listen(host, port) as listener, ExitStack() as learners:  # before torch is imported
        from outpace.serve.server import Server

        limits = _bounds(max_running, max_waiting, max_wait, max_body, not refuse_long_answers, lenient)
        named = served_model_name, drain, cors_origin
        options = _options(named, otlp_endpoint, keys, limits, prefix_store)
        ready = partial(_banner, host=host, listener=listener, keys=len(options.keys), began=began)
        more = source, place, drafter, profile, watching, learners, limits, others, adaptive
        load: Callable[[], Any] = partial(_one, *more, memory, prefix_cache)
        if several is not None:
            room = models_max or MOST, memory, prefix_cache
            load = partial(several.plan, limits, room, models_idle, prefix_store)
        _run(Server(options, load, ready), listener, not no_access_log)


def _options(
    named: tuple[list[str] | None, float, list[str] | None],
    endpoint: str | None,
    keys: Keys,
    limits: Limits,
    store: Path | None,
) -> Options:
    """The server's options; ``named`` are the names of its model, the time to drain, and origins."""
    from outpace.serve.server import Options

    names, drain, origins = named
    return Options(names or (), drain, origins or (), _tracer(endpoint), keys, limits, store)


def _one(
    source: Source,
    place: Place,
    drafter: str,
    profile: Path | None,
    watching: Attachment | None,
    learners: ExitStack,
    limits: Limits,
    others: dict[str, str],
    adaptive: bool | None,
    memory: float,
    prefixes: int | None,
) -> tuple[Loaded, Engine]:
    """Load the model of a server that has one, and make its engine."""
    from outpace.serve.engine import make_engine, rooms

    loaded, spec = profiled(replace(source, place=place), drafter, profile, "match")
    learner = learners.enter_context(attached(watching, loaded, spec))
    own = spec if learner is None else learner.drafter
    more = {"adaptive": "auto" if adaptive is None else adaptive, **rooms(memory, prefixes)}
    return loaded, make_engine(loaded, own, limits, others, learner, True, **more)


def _bounds(running: int, waiting: int, wait: float, body: float, cut: bool, lenient: bool) -> Limits:
    """The server's limits; ``body`` is in MiB."""
    from outpace.serve.admission import Limits

    return Limits(running, waiting, wait, body=int(body * 2**20), cut=cut, lenient=lenient)


def _tracer(endpoint: str | None) -> Tracer | None:
    """The tracer of requests, if their spans are sent anywhere."""
    from outpace.serve.telemetry import tracer_to

    return tracer_to(endpoint) if endpoint else None


def _checked(
    source: Source,
    several: Several | None,
    single: dict[str, Any],
    specs: list[str],
    endpoint: str | None,
    keys: Path | None,
) -> Keys:
    """Refuse missing extras, unknown names, and options of one model for several; return the server's keys.

    Imports no torch.
    """
    need("serve", "outpace serve")
    if endpoint:
        need("otel", "--otlp-endpoint")
    for spec in specs:
        source.check_names(spec)
    if several is not None:
        several.check(single)
    if single["--device-map"] is not None:
        read_device_map(single["--device-map"])
    from outpace.serve.auth import Keys

    return Keys.read(keys, os.environ.get(API_KEYS, ""))


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
    """Print where the service is and what it serves."""
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


def _others(given: list[str]) -> dict[str, str]:
    """Names and spec strings of further drafters."""
    found = dict[str, str]()
    for one in given:
        name, equals, spec = one.partition("=")
        if not (name and equals and spec):
            raise OutpaceError(f"--also takes NAME=SPEC, as in copy=prompt_lookup; not {one!r}")
        found[name] = spec
    return found


def _log(access: bool) -> None:
    """Log requests as lines of JSON, and errors as text, on standard error."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("outpace.access")
    log.propagate, log.level = False, logging.INFO
    log.handlers = [lines] if access else [logging.NullHandler()]
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
