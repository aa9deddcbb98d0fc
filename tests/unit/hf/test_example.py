"""The example runs, and prints what it should."""

from __future__ import annotations

import pytest

from examples_of import output_of


def test_transformers_generate(capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of("transformers_generate", capsys)
    assert "the same tokens: True" in output
    assert output.count("\n") > 4  # three lines, and the text that was streamed
