"""outpace makes autoregressive language models answer faster without changing one token.

The names in `__all__` are the public API. They are resolved on first use, so `import outpace` loads
neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import drafters, testing
    from .core import (
        ContextOverflow,
        Generation,
        OutpaceError,
        SamplingParams,
        Stats,
        StreamedToken,
        UnsupportedModel,
    )
    from .drafters import load_drafter
    from .drift import Drift, measure_drift
    from .engine import Engine
    from .hf import accelerate, decode, restore
    from .targets import Target

__version__ = "0.1.0"

__all__ = [
    "ContextOverflow",
    "Drift",
    "Engine",
    "Generation",
    "OutpaceError",
    "SamplingParams",
    "Stats",
    "StreamedToken",
    "Target",
    "UnsupportedModel",
    "__version__",
    "accelerate",
    "decode",
    "drafters",
    "load_drafter",
    "measure_drift",
    "nano_draft_path",
    "nano_drafter_path",
    "nano_path",
    "restore",
    "testing",
]

# Methods whose drafters for the embedded model come with it.
_TRAINED = ("eagle", "medusa")

_HOME = {
    "ContextOverflow": "core",
    "Drift": "drift",
    "Engine": "engine",
    "Generation": "core",
    "OutpaceError": "core",
    "SamplingParams": "core",
    "Stats": "core",
    "StreamedToken": "core",
    "Target": "targets",
    "UnsupportedModel": "core",
    "accelerate": "hf",
    "decode": "hf",
    "load_drafter": "drafters",
    "measure_drift": "drift",
    "restore": "hf",
}


def nano_path() -> Path:
    """The folder of the embedded model, in the Hugging Face format."""
    return _embedded("outpace-nano")


def nano_draft_path() -> Path:
    """The folder of the embedded draft model, which drafts for the one at `nano_path()`."""
    return _embedded("outpace-nano-draft")


def nano_drafter_path(method: str) -> Path:
    """The folder of an embedded drafter that was trained for the model at `nano_path()`.

    Args:
        method: "eagle" or "medusa".

    Raises:
        OutpaceError: there is none of this method.
    """
    if method not in _TRAINED:
        from .core import OutpaceError

        raise OutpaceError(
            f"there is no embedded drafter {method!r}, only {' and '.join(_TRAINED)}; train one with: "
            f"outpace train {method}"
        )
    return _embedded(f"outpace-nano-{method}")


def _embedded(name: str) -> Path:
    return Path(__file__).parent / "models" / name


def __getattr__(name: str) -> object:
    if name in ("drafters", "testing"):
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
