"""The laboratory's commands in outpace's help, and a model as a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.mark.parametrize("command", ["bench compare", "bench lab", "bench scaling", "drift", "gguf"])
def test_help_has_an_example(run: Run, command: str) -> None:
    assert f"Example: outpace {command}" in run(*command.split(), "--help").stdout


def test_a_model_as_a_gguf_file(run: Run, folder: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs outpace[gguf]")
    file = tmp_path / "tiny.gguf"
    args = ("gguf", "-m", folder, "--out", file)
    assert run(*args).exit_code == 0
    assert len(gguf.GGUFReader(file).tensors) == 9 + 3
    again = run(*args)
    assert again.exit_code == 2 and "would be lost" in " ".join(again.stderr.split())
    assert run(*args, "--overwrite", "--dtype", "float32").exit_code == 0
