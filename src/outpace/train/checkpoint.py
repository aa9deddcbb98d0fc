"""Checkpoints of a run: weights, the optimizer's state, and how far it has come. The newest is kept."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError

_PROGRESS = "progress.json"
CHECKPOINT, OLD = "checkpoint", "checkpoint.old"


class Checkpoints:
    """The checkpoint of a run, in the folder ``checkpoint`` of where it writes.

    Args:
        accelerator: accelerate's, with everything prepared.
        signature: what the run was started with; a run goes on from a checkpoint of the same alone.
    """

    def __init__(self, out: Path, accelerator: Any, signature: dict[str, Any]) -> None:
        self._folder = out / CHECKPOINT
        self._accelerator = accelerator
        # As it comes back from a file.
        self._signature = json.loads(json.dumps(signature))

    def load(self) -> dict[str, Any]:
        """Go on from the checkpoint; the progress it holds, empty where there is none.

        Raises:
            OutpaceError: it is of a run with other data or settings.
        """
        old = self._folder.with_name(OLD)
        if self._accelerator.is_main_process and old.is_dir() and not self._folder.exists():
            old.rename(self._folder)  # the writing of the next one was interrupted
        self._accelerator.wait_for_everyone()
        file = self._folder / _PROGRESS
        if not file.is_file():
            return {}
        found = json.loads(file.read_text(encoding="utf-8"))
        other = [name for name, value in self._signature.items() if found["signature"].get(name) != value]
        if other:
            raise OutpaceError(
                f"{self._folder} is of a run with other {', '.join(other)}; give the same data and settings "
                "to go on with it, or another --out"
            )
        self._accelerator.load_state(str(self._folder))
        progress: dict[str, Any] = found["progress"]
        return progress

    def save(self, progress: dict[str, Any]) -> None:
        """Write the checkpoint; an interrupted writing leaves the one before."""
        new = self._folder.with_name("checkpoint.new")
        main = self._accelerator.is_main_process
        if main:
            shutil.rmtree(new, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        with _quiet("accelerate.utils.other"):  # it warns of tied weights, which are tied again when loaded
            self._accelerator.save_state(str(new))
        self._accelerator.wait_for_everyone()  # each has written its own part
        if main:
            text = json.dumps({"progress": progress, "signature": self._signature}, indent=2)
            (new / _PROGRESS).write_text(text + "\n", encoding="utf-8")
            old = self._folder.with_name(OLD)
            shutil.rmtree(old, ignore_errors=True)
            if self._folder.exists():
                self._folder.rename(old)
            new.rename(self._folder)
            shutil.rmtree(old, ignore_errors=True)
        self._accelerator.wait_for_everyone()


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Errors only from a logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
