"""Folders of models in the Hugging Face format: in the package, and of `outpace pull smollm2`."""

from __future__ import annotations

import os
from pathlib import Path

from outpace.core import OutpaceError

CACHE = "OUTPACE_CACHE"

# Methods with an embedded drafter for the embedded model.
_TRAINED = ("eagle", "medusa")


class NoHome(OutpaceError):
    """The user has no home folder."""


def nano_path() -> Path:
    """The folder of the embedded model, in the Hugging Face format."""
    return _embedded("outpace-nano")


def nano_draft_path() -> Path:
    """The folder of the embedded draft model for the model at `nano_path()`."""
    return _embedded("outpace-nano-draft")


def nano_drafter_path(method: str) -> Path:
    """The folder of an embedded drafter that was trained for the model at `nano_path()`.

    Args:
        method: "eagle" or "medusa".

    Raises:
        OutpaceError: there is none of this method.
    """
    if method not in _TRAINED:
        raise OutpaceError(
            f"there is no embedded drafter {method!r}, only {' and '.join(_TRAINED)}; train one with: "
            f"outpace train {method}"
        )
    return _embedded(f"outpace-nano-{method}")


def smollm2_path() -> Path:
    """The folder that `outpace pull smollm2` writes to; it may not exist yet."""
    return cache_path() / "smollm2-135m-instruct"


def cache_path() -> Path:
    """The folder of models that are made or fetched once: ``$OUTPACE_CACHE``, by default ``outpace`` in the
    user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``).

    Raises:
        NoHome: none of these is known.
    """
    if named := os.environ.get(CACHE):
        return Path(named)
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise NoHome(f"the user has no home folder; set {CACHE} to a folder") from None
    return Path(caches) / "outpace"


def _embedded(name: str) -> Path:
    return Path(__file__).parent / "models" / name
