"""Tiny models as the console loads them."""

from __future__ import annotations

import pytest

from folders import save_llama
from outpace.console.models import Loaded, load


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(str(save_llama(tmp_path_factory.mktemp("models") / "tiny")), device="cpu")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(str(save_llama(tmp_path_factory.mktemp("models") / "chat", chat=True)), device="cpu")
