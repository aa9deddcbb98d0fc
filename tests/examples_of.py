"""Running the programs in examples/ in this process, which has imported what they need."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def output_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of an example."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out
