"""A tiny model as the console loads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from folders import save_llama
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
