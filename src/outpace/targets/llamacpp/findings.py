"""What the self-test of a GGUF file found, and all that it depends on, for the record (``step/record.py``).

The findings are known by the file (its size and time of change, its beginning with the metadata, samples
spread over the rest), llama.cpp's libraries and the processor's features that they use, the threads, the
target's options, and what the answers about transformers models depend on too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from outpace.targets.llamacpp.library import library, parts_of
from outpace.targets.llamacpp.options import LlamaCppOptions
from outpace.targets.llamacpp.self_test import Widths
from outpace.targets.step.record import digest, here

_HEAD = 1 << 25  # bytes at the beginning of a file: more than the metadata of a vocabulary of 500,000 tokens
_SAMPLES, _SAMPLE = 1024, 4096  # samples of the rest, and bytes of each


@dataclass(frozen=True)
class Findings:
    """What a self-test measured and chose.

    Attributes:
        repack: weights are repacked for the processor, as far as llama.cpp can.
        widths: numbers of rows of decodes.
        off: the largest difference between rows alone and among others, relative to their spread.
        seconds: number of rows of one sequence -> seconds of their forward.
    """

    repack: bool
    widths: Widths
    off: float
    seconds: Mapping[int, float]

    def text(self) -> str:
        """The findings as JSON, for ``read``."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | None) -> Findings | None:
        """The findings in a text; None if there are none."""
        try:
            found = json.loads(text or "")
            return cls(
                found["repack"],
                Widths(**found["widths"]),
                float(found["off"]),
                {int(rows): float(seconds) for rows, seconds in found["seconds"].items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def about(path: Path, options: LlamaCppOptions, threads: int, repack: bool) -> dict[str, str] | None:
    """All that the findings of a file depend on, as digests and words; None if that is not known.

    It is not known where llama.cpp was built for a GPU, whose kind and driver are not asked for.

    Args:
        path: the file; the first part of a split one.
        threads: number of threads of a forward.
        repack: whether weights may be repacked.
    """
    lib = library()
    build = _build(Path(lib.llama_cpp._lib._name).parent)
    if lib.llama_supports_gpu_offload() or build is None:
        return None
    # Whether inexact files are refused changes nothing that is found, nor does it whether the record is read.
    asked: dict[str, Any] = {**asdict(options), "exact": bool(options.exact), "threads": threads}
    del asked["check"]
    return {
        **here([torch.device("cpu")]),
        "file": digest([_sampled(part) for part in parts_of(path)]),
        "llama.cpp": f"{lib.__version__} {build} {lib.llama_print_system_info().decode(errors='replace')}",
        "options": f"{sorted(asked.items())}, weights may be repacked: {repack}",
    }


@lru_cache(maxsize=2)
def _build(folder: Path) -> str | None:
    """A digest of llama.cpp's libraries in a folder; None if they are not there."""
    files = sorted({*folder.glob("*ggml*"), *folder.glob("*llama*")})
    found = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files if file.is_file()]
    return digest(found)[:16] if found else None


def _sampled(path: Path) -> str:
    """A digest of a file's size, time of change, beginning, and samples of the rest."""
    status = path.stat()
    found = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        found.update(file.read(_HEAD))
        for place in range(_HEAD, status.st_size, max((status.st_size - _HEAD) // _SAMPLES, _SAMPLE)):
            file.seek(place)
            found.update(file.read(_SAMPLE))
    return found.hexdigest()
