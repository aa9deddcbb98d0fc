"""Fixtures of the benchmark's tests: tiny models as the command line loads them."""

from __future__ import annotations

import json
import shutil

import pytest

from folders import save_llama
from outpace.core import SamplingParams
from outpace.loading import Loaded, load


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(str(save_llama(tmp_path_factory.mktemp("models") / "tiny")), device="cpu")


@pytest.fixture(scope="session")
def ending_model(model: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The tiny model, with the fifth token that it emits after "abcdef" as its end token."""
    engine = model.engine()
    (found,) = engine.generate([model.tokens("abcdef")], SamplingParams(max_new_tokens=5, ignore_eos=True))
    end = found.tokens[-1]
    assert end not in found.tokens[:-1]
    folder = tmp_path_factory.mktemp("models") / "ending"
    shutil.copytree(model.source, folder)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "eos_token_id": end}), "utf-8")
    return load(str(folder), device="cpu")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(str(save_llama(tmp_path_factory.mktemp("models") / "chat", chat=True)), device="cpu")
