"""Where a trained module came from: data, command, versions, and what training showed."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outpace import __version__

PROVENANCE = "provenance.json"
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy")


def versions() -> dict[str, str]:
    found = {"outpace": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def write(folder: Path, facts: dict[str, Any]) -> None:
    """``provenance.json`` beside the weights: these facts, and the versions."""
    text = json.dumps({**facts, "versions": versions()}, indent=2)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")
