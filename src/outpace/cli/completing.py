"""What the shell completes: names of drafters and of models, found without importing torch."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outpace.embedded import smollm2_path
from outpace.plugins import installed

_FOLDER = Path(__file__).parent.parent / "drafters"
_MARK = "    paper: ClassVar[str] ="  # a file with this line has a drafter of the file's name


def drafters(incomplete: str) -> list[str]:
    """Names of drafters that complete the last of a list."""
    before, comma, last = incomplete.rpartition(",")
    own = [file.stem for file in _FOLDER.rglob("*.py") if _MARK in file.read_text("utf-8")]
    names = sorted({*own, *installed("drafters")})
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def models(incomplete: str) -> list[str]:
    """Names of models that are on this machine, and paths."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found = [path.name[8:].replace("--", "/") for path in Path(HF_HUB_CACHE).glob("models--*")]
    found += ["smollm2"] if smollm2_path().is_dir() else []
    names = sorted(name for name in found if name.startswith(incomplete))
    folder, slash, _ = incomplete.rpartition("/")
    for path in sorted(Path(f"{folder}{slash}" or ".").expanduser().glob("*")):
        name = f"{folder}{slash}{path.name}"
        if name.startswith(incomplete) and (path.is_dir() or path.suffix == ".gguf"):
            names.append(f"{name}/" if path.is_dir() else name)
    return names


def with_own_modules(given: Any) -> Any:
    """Let a spec that the user typed name a class of a file in the current folder, as ``mine:Mine``."""
    for spec in [given] if isinstance(given, str) else given or ():
        for name in re.findall(r"(\w+)\s*:\s*[^\W\d]", spec):
            if Path(f"{name}.py").is_file() and find_spec(name) is None:
                sys.path.append(str(Path.cwd()))
    return given
