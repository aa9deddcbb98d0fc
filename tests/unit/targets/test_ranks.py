"""Several processes over gloo: equal tokens, and one clear error for all within the time-out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parts import first
from unit.targets.ranked import tiny

SCRIPT = Path(__file__).with_name("ranked.py")
ROOT = Path(__file__).parents[3]
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])


def processes(
    folder: Path, mode: str, size: int, timeout: float = 60, fault: str = "", at: int = 1
) -> list[dict[str, Any]]:
    """The report of each rank; none of one that died.

    Args:
        fault: what goes wrong, and ``at`` which rank.
    """
    if mode == "tensor":
        tiny(size).save_pretrained(folder / "tiny")
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, mode, str(rank), str(size), folder / "store", str(timeout)]
            + ([fault] if rank == at else []),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TINY": str(folder / "tiny"), "PYTHONPATH": PATHS},
        )
        for rank in range(size)
    ]
    found = []
    for process in started:
        out, errors = process.communicate(timeout=240)
        found.append(json.loads(out) if out else {"died": errors[-2000:]})
    return found


@pytest.mark.parametrize("mode", first(1, ["tensor", "draft"]))
def test_two_processes_decode_as_one(tmp_path: Path, mode: str) -> None:
    """Ranks that share drafts have quick tests in threads, in ``test_shared_drafts``."""
    leader, other = processes(tmp_path, mode, 2)
    assert leader.get("equal"), leader
    assert other == {"ended": True}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["draft", "tensor"])
def test_three_processes_decode_as_one(tmp_path: Path, mode: str) -> None:
    leader, *others = processes(tmp_path, mode, 3)
    assert leader.get("equal"), leader
    assert others == [{"ended": True}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["draft", "tensor"])
@pytest.mark.parametrize(
    ("fault", "at", "reason"),
    [
        ("raise", 1, "rank 1 failed: ValueError: planted"),
        ("raise", 0, "rank 0 failed: ValueError: planted"),
        ("interrupt", 0, "rank 0 failed: KeyboardInterrupt"),
        ("die", 1, "has lost another rank"),
        ("die", 0, "has lost another rank"),
        ("slow", 1, "had no answer from another rank for 5 s"),
    ],
)
def test_all_end_with_one_error(tmp_path: Path, mode: str, fault: str, at: int, reason: str) -> None:
    found = processes(tmp_path, mode, 2, timeout=5, fault=fault, at=at)
    reports = [one for one in found if "died" not in one]
    assert len(reports) == (1 if fault == "die" else 2), found
    assert {one["kind"] for one in reports} == {"RanksLost"}, found
    assert len({one["error"] for one in reports}) == 1, found
    assert reason in reports[0]["error"]
    assert reports[0]["seconds"] < 30
