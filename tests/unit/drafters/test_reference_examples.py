"""The examples of docs/guides/generate.md run, and print what they should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples_of import output_of


@pytest.mark.parametrize("name", ["rewrite", "answer_from_documents", "edit_code"])
def test_an_example(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))  # without a real model
    output = output_of(name, capsys)
    assert "the same tokens: True" in output
    found = re.search(r"(\d+) tokens in (\d+) steps instead of (\d+)", output)
    assert found is not None
    tokens, steps, plain = map(int, found.groups())
    assert tokens == plain
    assert steps < plain


@pytest.mark.real
def test_a_real_model_mends_the_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of("rewrite", capsys)
    assert "the lesson tomorrow." in output and "a separate sheet" in output
    assert "26 tokens in 4 steps instead of 26" in output
