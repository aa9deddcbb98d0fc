"""Losslessness on SmolLM2-135M-Instruct, in float64; `make real` fetches it, `make test-real` runs these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from outpace import Engine, SamplingParams
from outpace.embedded import smollm2_path
from outpace.loading import Loaded, load

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not smollm2_path().is_dir(), reason="SmolLM2 is not here; make real fetches it"),
]

QUESTIONS = [
    "Write a Python function that returns the n-th Fibonacci number, and one that returns the first n.",
    "Natalia sold 48 clips in April, and half as many in May. How many did she sell in all?",
    "Repeat this sentence twice: The quick brown fox jumps over the lazy dog.",
    "Name three rivers of Europe and the cities they flow through.",
]
DRAFTERS = [
    "jacobi:num_speculative_tokens=6",
    "lookahead:window=4,ngram=4,guesses=4",
    "lookahead",
    "prompt_lookup",
    "suffix",
    "token_recycling:max_nodes=16,top_k=4",
    "combined:parts=(lookahead:window=3,ngram=3,guesses=3)+(prompt_lookup)",
    "self_speculative:skip=10+20,num_speculative_tokens=3",
]
PUBLISHED = [
    f"{folder.name.partition('-')[2]}:path={folder}"
    for folder in sorted((Path(__file__).parents[2] / "drafters").glob("smollm2-*"))
]
GREEDY = [SamplingParams(max_new_tokens=24)] * len(QUESTIONS)
SAMPLED = [
    SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=seed)
    for seed in range(len(QUESTIONS))
]


@pytest.fixture(scope="module")
def model() -> Loaded:
    return load("smollm2", "float64", "cpu")


def decode(
    model: Loaded, drafter: str | None, params: Sequence[SamplingParams], slots: int
) -> list[list[int]]:
    engine = Engine(model.target, drafter, tokenizer=model.tokenizer, adaptive=False, slots=slots)
    prompts = [model.encode(question, chat=True) for question in QUESTIONS]
    return [generation.tokens for generation in engine.generate(prompts, params)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    model: Loaded, params: Sequence[SamplingParams]
) -> None:
    plain = decode(model, None, params, slots=1)
    assert all(tokens for tokens in plain)
    for drafter in [*DRAFTERS, *PUBLISHED]:
        assert decode(model, drafter, params, slots=1) == plain, drafter
        assert decode(model, drafter, params, slots=3) == plain, f"{drafter}, three at once"


@pytest.mark.parametrize("drafter", PUBLISHED)
def test_published_drafters_predict_the_model(model: Loaded, drafter: str) -> None:
    engine = Engine(model.target, drafter, tokenizer=model.tokenizer, adaptive=False)
    found = engine.generate([model.encode(question, chat=True) for question in QUESTIONS], GREEDY)
    tokens, steps = (sum(getattr(own.stats, name) for own in found) for name in ("tokens", "steps"))
    assert tokens / steps > 1.5


def test_the_model_answers(model: Loaded) -> None:
    """The conversion kept the weights: a wrong one gives no sense."""
    ids = model.encode("What is the capital of France? Answer in one word.", chat=True)
    (answer,) = Engine(model.target, tokenizer=model.tokenizer).generate(
        [ids], SamplingParams(max_new_tokens=8)
    )
    assert answer.text is not None and "Paris" in answer.text
