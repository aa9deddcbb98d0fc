"""The example runs, and prints what it should."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "ralm.py"


def test_the_example_gives_the_same_tokens_with_fewer_calls(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    plain, speculative = (int(calls) for calls in re.findall(r"(\d+) calls of the knowledge base", out))
    assert speculative < plain
    assert "the same tokens: True" in out
    (documents,) = re.findall(r"^documents: (.*)$", out, flags=re.M)
    assert len(set(documents.split())) > 1
