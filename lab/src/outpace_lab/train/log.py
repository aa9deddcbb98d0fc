"""The log of a run, in JSONL: every step and every measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError

LOG = "log.jsonl"


class Log:
    """The log of a run in JSONL. Entries after the checkpoint from which a run resumes are dropped.

    Args:
        step: the step of that checkpoint; 0 for a new run.
        report: called with each entry.
        writes: whether this process writes the file.
    """

    def __init__(
        self, file: Path, step: int, report: Callable[[Mapping[str, Any]], None], writes: bool
    ) -> None:
        self._file = file if writes else None
        self._report = report
        if writes:
            file.parent.mkdir(parents=True, exist_ok=True)
            old = file.read_text(encoding="utf-8").splitlines() if step and file.exists() else []
            kept = [line for line in old if _whole(line) and json.loads(line)["step"] <= step]
            file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry.

        Raises:
            OutpaceError: a number in it is infinite or NaN; nothing is written then.
        """
        wrong = [name for name, value in entry.items() if not _finite(value)]
        if wrong:
            raise OutpaceError(
                f"training has failed: at step {entry['step']} the {wrong[0].replace('_', ' ')} is "
                f"{entry[wrong[0]]}. What was saved before is kept. Start again in another folder with a "
                "lower learning rate, without bf16, with the model in float32, or with another objective"
            )
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(entry) + "\n")
        self._report(entry)


def _finite(value: Any) -> bool:
    """True if a number, or every number in a list, is finite."""
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _whole(line: str) -> bool:
    """True if a line of the log was written completely."""
    return line.endswith("}")
