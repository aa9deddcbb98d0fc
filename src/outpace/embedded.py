"""Folders of the models that come with the package, in the Hugging Face format."""

from __future__ import annotations

from pathlib import Path

from outpace.core import OutpaceError

# Methods whose drafters for the embedded model come with it.
_TRAINED = ("eagle", "medusa")


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
        raise OutpaceError(
            f"there is no embedded drafter {method!r}, only {' and '.join(_TRAINED)}; train one with: "
            f"outpace train {method}"
        )
    return _embedded(f"outpace-nano-{method}")


def _embedded(name: str) -> Path:
    return Path(__file__).parent / "models" / name
