"""Checkpoints of a run: weights, optimizer state and progress. Only the newest is kept."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError
from outpace.files import read_json

_MOST_BYTES = 1 << 26
_PROGRESS = "progress.json"
CHECKPOINT, OLD = "checkpoint", "checkpoint.old"


class Checkpoints:
    """The checkpoint of a run, in the folder ``checkpoint`` of its output folder.

    Args:
        accelerator: accelerate's ``Accelerator``, with everything prepared.
        signature: what the run was started with; a run resumes only from a checkpoint with the same
            signature.
    """

    def __init__(self, out: Path, accelerator: Any, signature: dict[str, Any]) -> None:
        self._folder = out / CHECKPOINT
        self._accelerator = accelerator
        # In the form in which it is read back from a file.
        self._signature = json.loads(json.dumps(signature))

    def load(self) -> dict[str, Any]:
        """Restore the checkpoint and return its progress; empty if there is none.

        Raises:
            OutpaceError: it belongs to a run with other data or settings.
        """
        old = self._folder.with_name(OLD)
        if self._accelerator.is_main_process and old.is_dir() and not self._folder.exists():
            old.rename(self._folder)  # writing the next one was interrupted
        self._accelerator.wait_for_everyone()
        file = self._folder / _PROGRESS
        if not file.is_file():
            return {}
        found = read_json(file, _MOST_BYTES)
        whole = isinstance(found, dict) and isinstance(found.get("signature"), dict) and "progress" in found
        if not whole:
            raise OutpaceError(f"{file} is not a checkpoint's; delete {self._folder}, or give another --out")
        other = [name for name, value in self._signature.items() if found["signature"].get(name) != value]
        if other:
            raise OutpaceError(
                f"{self._folder} belongs to a run with other {', '.join(other)}; give the same data and "
                "settings to resume it, or another --out"
            )
        self._accelerator.load_state(str(self._folder))
        progress: dict[str, Any] = found["progress"]
        return progress

    def save(self, progress: dict[str, Any]) -> None:
        """Write the checkpoint; if interrupted, the previous one remains."""
        new = self._folder.with_name("checkpoint.new")
        main = self._accelerator.is_main_process
        if main:
            shutil.rmtree(new, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        with _quiet("accelerate.utils.other"):  # it warns about tied weights, which are tied again on loading
            self._accelerator.save_state(str(new))
        self._accelerator.wait_for_everyone()  # each process has written its part
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
    """Silence a logger below errors."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
