"""The first half hour on a GPU, on the emulated one, and measurements of steps on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = Path(__file__).parents[3] / "measure"


def run(script: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(MEASURE / script), *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_dry_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    steps = ("versions", "tokens", "profile", "memory", "families")
    run("first_hour.py", "--emulate", "--out", str(tmp_path), "--page", str(page), "--steps", *steps)
    found = {step: json.loads((tmp_path / f"{step}.json").read_text())["found"] for step in steps}
    assert found["tokens"] and all(row["equal"] == row["of"] for row in found["tokens"])
    assert not any(row["reason"] for row in found["families"])
    assert found["memory"]["complete"] == found["memory"]["of"]
    assert all(f"## {step}" in page.read_text() for step in steps)


@pytest.mark.slow
def test_steps_at_the_usual_context_and_batch(tmp_path: Path) -> None:
    """As on a GPU, but for the shape: prompts of 512 tokens, 1 and 8 at a time, rows written one by one."""
    out = tmp_path / "out.json"
    tiny = ("--device", "cpu", "--shapes", "tiny", "--dtypes", "float32", "--batches", "1", "8")
    run("gpu.py", *tiny, "--tokens", "4", "--rounds", "1", "--out", str(out))
    assert [row["batch"] for row in json.loads(out.read_text())["rows"]] == [1, 8]
