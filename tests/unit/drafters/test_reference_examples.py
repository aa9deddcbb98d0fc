"""The examples of docs/recipes.md run, and say what they are meant to say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["rewrite", "answer_from_documents", "edit_code"])
def test_an_example(name: str) -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert "the same tokens: True" in run.stdout
    found = re.search(r"(\d+) tokens in (\d+) steps instead of (\d+)", run.stdout)
    assert found is not None
    tokens, steps, plain = map(int, found.groups())
    assert tokens == plain
    assert steps < plain
