"""The commands that install what is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Package = Literal["outpace", "outpace-lab"]
_PLACES: dict[Package, str] = {"outpace": ".", "outpace-lab": "./lab"}  # in a clone


def install(extra: str = "", package: Package = "outpace") -> str:
    """The command that installs an extra of a package, or without an extra the package.

    Where this runs from a clone, it names the clone's folder: an index may not have the package, or another
    version of it. The quotes are those of every shell, Windows' too.
    """
    place, wanted = _PLACES[package], f"[{extra}]" if extra else ""
    root = clone()
    if not (root / place / "pyproject.toml").is_file():
        return f'pip install "{package}{wanted}"' if extra else f"pip install {package}"
    here = os.path.realpath(os.curdir) == str(root.resolve())
    return f'pip install --editable "{place if here else root / place}{wanted}"'


def clone() -> Path:
    """The folder of the clone that this runs from; any folder if it is installed."""
    return Path(__file__).parents[3]
