"""outpace makes autoregressive language models answer faster without changing one token.

docs/concepts/exactness.md has what that means.

The names in `__all__` are the public API. They are resolved on first use, so `import outpace` loads
neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__
from .core import uncollected
from .embedded import nano_draft_path, nano_drafter_path, nano_path
from .native.instructions import limit_libraries

if TYPE_CHECKING:
    from . import drafters, testing
    from .core import (
        ContextOverflow,
        Generation,
        OutpaceError,
        SamplingParams,
        Speculation,
        Stats,
        StreamedToken,
        StructuredOutputs,
        UnsupportedModel,
    )
    from .drafters import load_drafter
    from .engine import AsyncEngine, Engine
    from .hf import accelerate, decode, restore
    from .loading import load
    from .targets import Target

__all__ = [
    "AsyncEngine",
    "ContextOverflow",
    "Engine",
    "Generation",
    "OutpaceError",
    "SamplingParams",
    "Speculation",
    "Stats",
    "StreamedToken",
    "StructuredOutputs",
    "Target",
    "UnsupportedModel",
    "__version__",
    "accelerate",
    "decode",
    "drafters",
    "load",
    "load_drafter",
    "nano_draft_path",
    "nano_drafter_path",
    "nano_path",
    "restore",
    "testing",
]

limit_libraries()  # before torch is imported, which reads them

_HOME = {
    "AsyncEngine": "engine",
    "ContextOverflow": "core",
    "Engine": "engine",
    "Generation": "core",
    "OutpaceError": "core",
    "SamplingParams": "core",
    "Speculation": "core",
    "Stats": "core",
    "StreamedToken": "core",
    "StructuredOutputs": "core",
    "Target": "targets",
    "UnsupportedModel": "core",
    "accelerate": "hf",
    "decode": "hf",
    "load": "loading",
    "load_drafter": "drafters",
    "restore": "hf",
}


def __getattr__(name: str) -> object:
    if name in ("drafters", "testing"):
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with uncollected():
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
