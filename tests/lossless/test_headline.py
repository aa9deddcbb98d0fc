"""What a newcomer gets without options on SmolLM2 is what the tables measured: drafter, dtype, kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.cli.app import app
from outpace.core import DEFAULT_DRAFTER
from outpace.embedded import smollm2_path

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not smollm2_path().is_dir(), reason="SmolLM2 is not here; outpace pull smollm2"),
]
ROOT = Path(__file__).parents[2]


def marked() -> Iterator[str]:
    """The methods of the rows that are marked as the default."""
    for line in (ROOT / "docs" / "measurements" / "speed.md").read_text("utf-8").splitlines():
        if found := re.match(r"\| `([^`]+)` \(default\) \|", line):
            yield found[1]


def run(*words: str) -> Any:
    found = CliRunner().invoke(app, list(words))
    assert found.exit_code == 0, found.output
    return found


def test_the_defaults_are_what_was_measured() -> None:
    about = json.loads(run("env", "--model", "smollm2", "--json").stdout)["model"]
    assert DEFAULT_DRAFTER in about["drafter"]  # with the rounded self beside it, where steps take longer
    assert set(marked()) == {DEFAULT_DRAFTER}
    assert about["dtype"] == "bfloat16" and about["native"] and about["bit_exact"]
    assert set(about["packed"]) == {"compiled"} and about["slow"] == []


def test_the_headline_without_options() -> None:
    found = run("generate", "-m", "smollm2", "--chat", "-p", "Count from one to thirty in words.", "--json")
    stats = json.loads(found.stdout)["stats"]
    assert stats["promise"] == "same bits" and stats["slow"] == []
    assert stats["steps"] < stats["tokens"] and "slower" not in found.stderr
