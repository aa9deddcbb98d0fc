"""``outpace env``: what is here, and how a model would run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from folders import byte_tokenizer
from mtp_folders import write
from outpace.core import DEFAULT_DRAFTER, EXTRAS, install
from parts import since
from without_torch import check_beginnings

Run = Callable[..., Any]


def test_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run("env")  # compiles what it needs, which another cache would not have
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr("outpace.cli.env.missing", lambda extra: ["thing"] if extra == "serve" else [])
    found = json.loads(run("env", "--json").stdout)
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["cache"] == str(tmp_path)
    assert set(found["extras"]) == set(EXTRAS) and "model" not in found
    said = run("env").stdout
    assert f"{install('serve')} (thing)" in " ".join(said.split()) and "installed" in said
    monkeypatch.setenv("CC", "no-such-compiler")
    assert json.loads(run("env", "--json").stdout)["compiler"] is None


def test_what_needs_no_torch_is_shown_before_it_is_imported() -> None:
    check_beginnings({"env": "outpace[serve]", "env --model smollm2": "outpace[serve]"})


def test_how_a_model_would_run(run: Run, folder: Path) -> None:
    found = json.loads(run("env", "--model", folder, "--json").stdout)["model"]
    assert found["served"] and (found["dtype"], found["drafter"]) == ("float32", DEFAULT_DRAFTER)
    assert not found["native"] and {"step": "invariant", "reason": "it is for GPUs"} in found["passed_over"]
    assert "not native" in found["slow"][0]
    said = " ".join(run("env", "--model", folder, "--stock").stdout.split())
    assert "step stock" in said and "bit exact no" in said and "leave stock out" in said


def test_a_model_that_is_not_served(run: Run) -> None:
    found = run("env", "--model", "./no/such/folder", "--json")
    assert found.exit_code == 0
    about = json.loads(found.stdout)["model"]
    assert about == {
        "name": "./no/such/folder",
        "served": False,
        "reason": "no such folder: ./no/such/folder",
    }
    assert "served no" in " ".join(run("env", "--model", "./no/such/folder").stdout.split())


@since("5.24")
def test_what_the_model_brings_is_said_and_taken(run: Run, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "glm4_moe")
    byte_tokenizer().save_pretrained(folder)
    found = json.loads(run("env", "--model", folder, "--json").stdout)["model"]
    assert found["drafter"] == f"combined:({DEFAULT_DRAFTER})+(mtp)"
    assert found["drafter_because"] == "prediction layers in its checkpoint"

    def drafters(*more: str) -> set[str]:
        decoded = run(
            "generate", "-m", folder, "-p", "ABABAB", "--raw", "-n", 12, "--no-adaptive", "--json", *more
        )
        return set(json.loads(decoded.stdout)["stats"]["extra"])

    assert "mtp_drafted" in drafters()
    assert not drafters("--drafter", "suffix")
