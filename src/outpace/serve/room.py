"""Memory for several models: what each takes, what it is given for texts, and whether another one fits."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outpace.engine.engine import Engine
from outpace.loading import Loaded
from outpace.serve.engine import rooms
from outpace.serve.errors import Refused
from outpace.targets.hardware import free_bytes

_CPU = torch.device("cpu")
_GIB, _PIECE = 2**30, 2**22
_ROWS = 8  # of a model's memory, the part that its rows need at least


@dataclass(frozen=True)
class Known:
    """What is known of a model before it is loaded.

    Attributes:
        name: its name in requests.
        bytes: memory that it takes on its device, without the rows of texts.
        load: loads it and makes its engine, whose memory it is given as arguments of ``Engine``.
        files: those of its weights.
    """

    name: str
    bytes: int
    load: Callable[[dict[str, Any]], tuple[Loaded, Engine]] = field(compare=False, repr=False)
    device: torch.device = _CPU
    files: tuple[Path, ...] = ()

    def read(self) -> None:
        """Read its files into the system's memory, so that others' steps do not wait for a disk."""
        piece = bytearray(_PIECE)
        for path in self.files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass


class Room:
    """The memory that models share; each device's is what is free when this is made.

    Args:
        most: maximum number of models that are loaded at once.
        memory, prefixes: as for ``rooms``, of all models together; each gets an equal part of what is left
            besides weights.
        free: the free bytes of a device; None if unknown.
    """

    def __init__(
        self,
        most: int,
        memory: float,
        prefixes: int | None,
        free: Callable[[torch.device], int | None] = free_bytes,
    ) -> None:
        self.most = most
        self._whole = rooms(memory, prefixes)
        self._free = free
        self._totals: dict[torch.device, int | None] = {}
        self._given: dict[str, int] = {}  # bytes for rows by the names of models

    def of(self, device: torch.device) -> int | None:
        """The bytes of a device for all models; None if unknown."""
        if device not in self._totals:
            self._totals[device] = self._free(device)
        return self._totals[device]

    def check(self, model: Known) -> None:
        """Refuse a model that would not fit alone.

        Raises:
            Refused: its weights take more memory than there is.
        """
        total = self.of(model.device)
        needed = model.bytes + model.bytes // _ROWS
        if total is not None and needed > total:
            message = f"{model.name} needs {_gib(needed)}, and there are {_gib(total)} for models here"
            raise Refused(503, message, "model", "model_too_large", {"x-should-retry": "false"})

    def lacks(self, model: Known, loaded: Sequence[Known]) -> bool:
        """True if a model does not fit beside those that are loaded."""
        if len(loaded) >= self.most:
            return True
        left, free = self._left(model, loaded), self._free(model.device)
        return (left is not None and left < model.bytes // _ROWS) or (free is not None and free < model.bytes)

    def lacking(self, model: Known) -> str:
        """The reason why a model does not fit though none is loaded: others have taken the memory."""
        free = self._free(model.device)
        return f"{model.name} needs {_gib(model.bytes)}, and {_gib(free or 0)} are free now; try again later"

    def give(self, model: Known, loaded: Sequence[Known]) -> dict[str, Any]:
        """The memory of a model's engine beside those that are loaded, as arguments of ``Engine``."""
        left, parts = self._left(model, loaded), self.most - len(loaded)
        found = dict[str, Any]()
        for name, value in self._whole.items():
            if value is None or (value < 1 and left is None):
                found[name] = value
            else:
                found[name] = max(1, int(value * (left or 0) / parts if value < 1 else value / self.most))
        self._given[model.name] = sum(value for value in found.values() if isinstance(value, int))
        return found

    def _left(self, model: Known, loaded: Sequence[Known]) -> int | None:
        """Bytes that are left for rows on a model's device once it is loaded; None if unknown."""
        total = self.of(model.device)
        taken = sum(one.bytes + self._given[one.name] for one in loaded if one.device == model.device)
        return None if total is None else total - taken - model.bytes


async def release() -> None:
    """Give memory of what is no longer used back to the system and the devices."""
    await asyncio.to_thread(_release)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # glibc keeps what was freed between other blocks: more than half of a model's memory


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
