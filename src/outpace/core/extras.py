"""Optional packages: what each extra of ``outpace`` installs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from outpace.core.errors import OutpaceError
from outpace.core.remedies import install

# Extra -> modules that it installs, the package's own first.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "serve": ("fastapi", "pydantic", "uvicorn", "sse_starlette", "prometheus_client", "llguidance"),
    "images": ("PIL",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "gguf": ("gguf", "accelerate"),
    "llamacpp": ("llama_cpp",),
    "devices": ("accelerate",),
    "lora": ("peft",),
    "gpu": ("triton",),
    "ray": ("ray",),
}


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed; none is imported."""
    return [module for module in EXTRAS[extra] if not _found(module)]


def need(extra: str, purpose: str) -> None:
    """Check that an extra is installed, without importing it.

    Raises:
        OutpaceError: it is not; the message names the remedy.
    """
    if lacks := missing(extra):
        raise OutpaceError(f"{purpose} needs {lacks[0]}, which is not installed: {install(extra)}")


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it
        return False
