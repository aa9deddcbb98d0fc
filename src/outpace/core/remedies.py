"""The commands that install what is missing."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

Package = Literal["outpace", "outpace-lab"]
_PLACES: dict[Package, str] = {"outpace": ".", "outpace-lab": "./lab"}  # in a clone


def install(extra: str = "", package: Package = "outpace") -> str:
    """The command that installs an extra of a package, or without an extra the package.

    Where this runs from a clone, or was installed from one or from a wheel, it names that: an index may not
    have the package, or another version of it. The quotes are those of every shell, Windows' too.
    """
    place, wanted = _PLACES[package], f"[{extra}]" if extra else ""
    source = origin()
    for root, how in ((clone(), "--editable "), (source, "")):
        if root is not None and (root / place / "pyproject.toml").is_file():
            here = os.path.realpath(os.curdir) == str(root.resolve())
            return f'pip install {how}"{place if here else root / place}{wanted}"'
    if package == "outpace" and source is not None and source.is_file():
        return f'pip install "{source}{wanted}"'
    return f'pip install "{package}{wanted}"' if extra else f"pip install {package}"


def origin() -> Path | None:
    """The folder or file that outpace was installed from; None if that was an index."""
    try:
        noted = distribution("outpace").read_text("direct_url.json")
    except PackageNotFoundError:  # it runs from a path
        return None
    address = urlsplit(json.loads(noted)["url"] if noted else "")
    return Path(url2pathname(address.path)) if address.scheme == "file" else None


def clone() -> Path:
    """The folder of the clone that this runs from; any folder if it is installed."""
    return Path(__file__).parents[3]
