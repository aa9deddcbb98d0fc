"""The drafters that come with the embedded model."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.core import Generation, OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import TargetModel
from outpace.testing import ToyTarget

# Prompts of the kinds that the embedded model knows, of none of which the drafters have seen the words.
PROMPTS = [
    "Question: Nora has 15 pens and buys 9 more. How many pens has she now?\nAnswer:",
    "Question: A train goes 60 miles an hour for 4 hours. How far does it go?\nAnswer:",
    'def count_words(text):\n    """Return how many words a text has."""\n',
    "User: Who are you?\nAssistant:",
]
# Tokens a step, a little below what was measured; plain decoding has 1.
FLOORS = {"medusa": 1.5, "eagle": 1.4, "draft_model": 1.7}
MOST_MEGABYTES = 24


@lru_cache
def target() -> TargetModel:
    path = outpace.nano_path()
    return outpace.Target(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64))


def decode(drafter: str, params: SamplingParams) -> list[Generation]:
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    return Engine(target(), drafter, adaptive=False).generate(prompts, params)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", FLOORS)
def test_a_drafter_without_a_path_is_the_embedded_one(drafter: str) -> None:
    params = SamplingParams(max_new_tokens=64)
    plain, found = decode("none", params), decode(drafter, params)
    assert [generation.tokens for generation in found] == [generation.tokens for generation in plain]
    tokens = sum(generation.stats.tokens for generation in found)
    assert tokens / sum(generation.stats.steps for generation in found) > FLOORS[drafter]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", FLOORS)
def test_sampled_tokens_are_those_of_plain_decoding(drafter: str) -> None:
    params = SamplingParams(max_new_tokens=32, temperature=0.8, seed=5)
    plain, found = decode("none", params), decode(drafter, params)
    assert [generation.tokens for generation in found] == [generation.tokens for generation in plain]


@pytest.mark.parametrize("drafter", ["medusa", "eagle"])
def test_another_model_is_refused(drafter: str) -> None:
    with pytest.raises(OutpaceError, match=f"made for outpace-nano .* outpace train {drafter}"):
        Engine(ToyTarget(), drafter, adaptive=False).generate([[1, 2]], SamplingParams(max_new_tokens=2))


def test_a_method_without_one_is_refused() -> None:
    with pytest.raises(OutpaceError, match="no embedded drafter 'hydra', only eagle and medusa"):
        outpace.nano_drafter_path("hydra")


def test_all_embedded_weights_are_small() -> None:
    files = outpace.nano_path().parent.rglob("*.safetensors")
    sizes = {file.parent.name: file.stat().st_size for file in files}
    assert len(sizes) == 4
    assert sum(sizes.values()) < MOST_MEGABYTES * 10**6


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_a_card_and_a_provenance_come_with_it(method: str) -> None:
    folder = outpace.nano_drafter_path(method)
    facts = json.loads((folder / "provenance.json").read_text("utf-8"))
    assert facts["result"]["method"] == method
    assert facts["command"][:2] == ["outpace", "train"]
    assert not [part for part in facts["command"] if Path(part).is_absolute()]
    assert facts["data"]["sha256"]
    assert " ".join(facts["command"]) in (folder / "README.md").read_text("utf-8")
