"""The example runs, and says what it is meant to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "transformers_generate.py"


def test_transformers_generate() -> None:
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "the same tokens: True" in run.stdout
    assert run.stdout.count("\n") > 4  # three lines, and the text that was streamed
