"""OpenTelemetry: one span per request, if an endpoint is configured."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from outpace._version import __version__
from outpace.core import OutpaceError, install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer


def tracer_to(endpoint: str) -> Tracer:
    """Make a tracer whose spans are sent to a collector's URL; errors as for ``provider_to``."""
    return provider_to(endpoint).get_tracer("outpace", __version__)


def provider_to(endpoint: str) -> TracerProvider:
    """Make a provider whose spans are sent to a collector's URL (OTLP over HTTP) in the background.

    Raises:
        OutpaceError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise OutpaceError(
            f"--otlp-endpoint needs {error.name}, which is not installed: {install('otel')}"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "outpace"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def note(tracer: Tracer, headers: Headers, line: dict[str, Any]) -> None:
    """Record a span of a request that has just ended, as a child of the client's ``traceparent`` if sent.

    Args:
        line: the request's line of the access log.
    """
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    end = time.time_ns()
    attributes = {
        "http.request.method": line["method"],
        "url.path": line["path"],
        "outpace.request_id": line["id"],
    }
    if line["status"] is not None:
        attributes["http.response.status_code"] = line["status"]
    span = tracer.start_span(
        f"{line['method']} {line['path']}",
        context=TraceContextTextMapPropagator().extract(dict(headers)),
        kind=SpanKind.SERVER,
        attributes=attributes,
        start_time=end - int(line["seconds"] * 1e9),
    )
    span.end(end)
