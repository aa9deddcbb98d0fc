"""The example of docs/guides/add-a-drafter.md runs; tests/test_pages.py compares it with the page."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

from outpace.drafters import DRAFTERS, load_drafter

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "bigram_drafter.py"


def test_the_example_runs_and_saves_steps(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    plain, fast = (
        re.fullmatch(r"(\w+) +(\d+) tokens in (\d+) steps: ([\d.]+) per step", line)
        for line in capsys.readouterr().out.splitlines()
    )
    assert plain and fast
    assert (plain[1], fast[1]) == ("plain", "bigram")
    assert plain[2] == plain[3] == fast[2]
    assert float(fast[4]) > 1.1


def test_an_own_drafter_gets_a_spec_string(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("bigram_drafter", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bigram_drafter", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(DRAFTERS, "bigram", module.Bigram)
    assert load_drafter("bigram:length=6") == module.Bigram(length=6)
