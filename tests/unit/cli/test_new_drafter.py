"""``outpace new-drafter``: what it writes works at once."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, which is not on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    sys.modules.pop("my_own", None)


def test_the_template_keeps_the_contract(run: Any, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run("new-drafter", "my_own")
    assert result.exit_code == 0 and "--drafter my_own:MyOwn:length=4" in result.stderr
    runpy.run_path(str(place / "my_own.py"), run_name="__main__")
    assert "MyOwn keeps the contract" in capsys.readouterr().out


@pytest.mark.parametrize(
    "spec", ["my_own:MyOwn:length=6", '{"method": "combined", "parts": ["suffix", "my_own:MyOwn"]}']
)
def test_its_spec_decodes_at_once(run: Any, folder: Path, place: Path, spec: str) -> None:
    run("new-drafter", "my_own")
    common = ("generate", "-m", folder, "-p", "abcabcabcabc", "-n", 12, "--no-adaptive", "--json", "-d")
    plain, drafted = (json.loads(run(*common, name).stdout) for name in ("none", spec))
    assert drafted["tokens"] == plain["tokens"] and drafted["stats"]["drafted"] > 0
    assert json.loads(run("drafters", "my_own:MyOwn", "--json").stdout)["options"][0]["name"] == "length"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Own", "has small letters, digits and underscores; not 'My-Own'"),
        ("json", "Python has a module 'json' already"),
        ("mine", "mine.py is there already"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(run: Any, place: Path, name: str, message: str) -> None:
    (place / "mine.py").write_text("kept", "utf-8")
    result = run("new-drafter", name)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
    assert (place / "mine.py").read_text("utf-8") == "kept" and len(list(place.iterdir())) == 1


def test_a_folder_without_the_file_stays_off_the_path(run: Any, folder: Path, place: Path) -> None:
    result = run("generate", "-m", folder, "-p", "a", "-d", "my_own:MyOwn")
    assert result.exit_code == 2 and "no drafter 'my_own'" in result.stderr
    assert str(place) not in sys.path
