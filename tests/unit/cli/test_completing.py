"""What the shell completes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outpace.cli import completing
from outpace.cli.app import app
from outpace.drafters import DRAFTERS
from outpace.plugins import installed


def test_names_of_drafters_are_those_that_there_are() -> None:
    assert completing.drafters("") == sorted({*DRAFTERS, *installed("drafters")})
    assert completing.drafters("none,look") == ["none,lookahead"]


def test_models_are_those_of_the_caches_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "hub/models--some--model/snapshots/a",
        "hub/datasets--some--set",
        "cache/smollm2-135m-instruct",
        "sub",
    ):
        (tmp_path / name).mkdir(parents=True)
    for name in ("small.gguf", "sub/other.gguf", "some.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    assert completing.models("s") == ["smollm2", "some/model", "small.gguf", "sub/"]
    assert completing.models("sub/") == ["sub/other.gguf"]


@pytest.mark.parametrize(
    ("line", "found"), [("serve --drafter suf", "suffix"), ("bench --drafters none,suf", "none,suffix")]
)
def test_the_shell_is_answered(line: str, found: str) -> None:
    words = f"outpace {line}"
    asked = {
        "_OUTPACE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    assert CliRunner().invoke(app, [], env=asked, prog_name="outpace").stdout.split() == [found]
