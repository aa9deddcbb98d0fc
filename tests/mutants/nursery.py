"""Runs pytest on mutants, each in a fork of this process, which has imported what takes seconds.

Reads a job per line, in JSON: ``arguments`` of pytest, ``environment``, and the file of its ``output``.
Writes the status of its end per line: that of pytest, or minus the signal that ended it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

HOOK = Path(__file__).parent / "hook"
_SECONDS = 300  # a mutant may never end
_SLOW = ("numpy", "scipy.stats", "torch", "transformers.models.auto", "transformers.generation")
# The profile of running.py, but a failing example need not be the smallest.
settings.register_profile(
    "mutants",
    settings(derandomize=True, deadline=None, database=None, phases=(Phase.explicit, Phase.generate)),
)


def run(job: dict[str, Any]) -> int:
    """Run pytest in this process, and return its status."""
    signal.alarm(_SECONDS)
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path.insert(0, str(HOOK))
    sys.modules.pop("sitecustomize", None)  # the system's
    importlib.import_module("sitecustomize")
    status = int(pytest.main(job["arguments"]))
    atexit._run_exitfuncs()  # temporary folders
    sys.stdout.flush()
    return status


def main() -> None:
    for name in _SLOW:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                status = run(json.loads(line))
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
