"""The provenance of a trained module: data, command, versions and results."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outpace._version import __version__
from outpace.core import OutpaceError
from outpace.files import read_json

PROVENANCE = "provenance.json"
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "numpy")


def versions() -> dict[str, str]:
    found = {"outpace": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def read(folder: Path) -> dict[str, Any]:
    """Read the provenance of a finished run; empty if there is none.

    Raises:
        OutpaceError: the file cannot be read.
    """
    file = folder / PROVENANCE
    if not file.is_file():
        return {}
    try:
        found: Any = read_json(file)
    except OutpaceError as error:
        raise OutpaceError(f"{error}; give another --out") from error
    return found if isinstance(found, dict) and "result" in found else {}


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Write ``provenance.json`` beside the weights: the facts, and the versions of the packages."""
    text = json.dumps({**facts, "versions": versions()}, indent=2)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")
