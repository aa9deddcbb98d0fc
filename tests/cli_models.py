"""Fixtures of the command line's tests: tiny models as it loads them, and a way to run it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from folders import save_llama
from outpace.cli.app import app
from outpace.loading import Loaded, load


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny-chat", chat=True)


@pytest.fixture(scope="session")
def model(folder: Path) -> Loaded:
    return load(str(folder), device="cpu")


@pytest.fixture(scope="session")
def chat_model(chat_folder: Path) -> Loaded:
    return load(str(chat_folder), device="cpu")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the command line with these arguments, without the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "100")

    def invoke(*args: Any, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)

    return invoke


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of three prompts, one of them with a category, one a conversation."""
    file = tmp_path / "prompts.jsonl"
    lines: list[Any] = ["abcabcabc", {"prompt": "xyzxyz", "category": "b"}, {"turns": ["a", "b"]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file
