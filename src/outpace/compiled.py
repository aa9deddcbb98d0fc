"""Functions in C, compiled with the machine's compiler on first use, for its processor.

``OUTPACE_CPU`` limits the instructions that they use (``instructions.py``). The libraries are kept in the
user's cache folder, and run in torch's threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch

from outpace.core import first_line
from outpace.embedded import cache_path
from outpace.instructions import chosen

_log = logging.getLogger(__name__)
_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")

# Name of a function -> types of its result and of its arguments.
Signatures = Mapping[str, tuple[Any, list[Any]]]


def compiled(source: Path, signatures: Signatures, *flags: str) -> CDLL | str:
    """The functions of a C file; the reason why there are none here.

    Args:
        flags: further options of the compiler.
    """
    if sys.platform != "linux":
        return f"compiled functions are for Linux, not {sys.platform}"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "there is no C compiler; install gcc or clang, or set CC"
    # torch's own OpenMP library, so that both use the same threads.
    threads = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")) or sorted(
        (Path(torch.__file__).parent.parent / "torch.libs").glob("libgomp*")
    )
    limit = chosen()
    march = "native" if limit is None else limit.march
    command = [compiler, f"-march={march}", *_FLAGS, *flags, str(source), *map(str, threads[:1])]
    about = "\n".join([*command, source.read_text("utf-8"), platform.machine(), _processor()])
    library = cache_path() / "native" / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.so"
    try:
        if not library.exists():
            _compile(command, library)
        found = CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("%s is not compiled", source.name, exc_info=True)
        return f"{compiler} could not compile them: {first_line(error)}"
    for name, (result, arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def _compile(command: list[str], library: Path) -> None:
    """Compile beside the library's place and move it there, so that no other process reads a partial file."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        done = subprocess.run(
            [*command, "-o", str(made), "-lm"], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise OSError(done.stderr.strip() or f"exit status {done.returncode}")
        made.replace(library)


def _processor() -> str:
    """The processor's name and instruction sets, since a cache folder may be shared by machines."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def pointer(tensor: Any) -> int | None:
    """Address of a tensor's data; None for None."""
    return None if tensor is None else int(tensor.data_ptr())


def address(array: Any) -> int:
    """Address of a NumPy array's data."""
    return int(array.ctypes.data)
