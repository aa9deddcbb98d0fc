"""Drafts are lossless for checkpoints with rounded weights: the tokens are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from outpace import accelerate, restore
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.loading import Loaded, load
from outpace.native.layers import functions
from rounded_folders import save_rounded
from serving import run, serving
from zoo.test_families import RandomTrees

AT_ONCE = 4
PROMPTS = [[40 + (7 * start + 3 * place) % 50 for place in range(9 + 5 * start)] for start in range(AT_ONCE)]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
PARAMS = [replace(GREEDY, temperature=0.9 * (place % 2), seed=place) for place in range(AT_ONCE)]

pytestmark = pytest.mark.skipif(isinstance(functions(torch.bfloat16), str), reason="needs a C compiler")


@cache
def model(kind: str) -> Loaded:
    with TemporaryDirectory() as folder:
        save_rounded(Path(folder), kind)
        return load(folder, device="cpu")


def decode(kind: str, drafter: Any, slots: int, chunk: int) -> list[list[int]]:
    engine = Engine(model(kind).target, drafter, adaptive=False, slots=slots, prefill_chunk=chunk)
    return [generation.tokens for generation in engine.generate(PROMPTS, PARAMS)]


@cache
def plain(kind: str) -> list[list[int]]:
    return decode(kind, "none", 1, 512)


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed"])
def test_a_server_gives_the_tokens_of_generate(kind: str) -> None:
    loaded, ids = model(kind), PROMPTS[0]
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": -1}
    plain = accelerate(loaded.target.model, "none")
    expected = plain.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
    restore(loaded.target.model)

    async def main() -> None:
        async with serving("lookahead", loaded=loaded) as client:
            asked = {"prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            found = await client.send("/v1/completions", {**asked, "return_token_ids": True}).json()
            assert found["choices"][0]["token_ids"] == expected

    run(main)
    assert len(set(expected)) > 5


@pytest.mark.parametrize("kind", ["awq", "packed 8"])
@pytest.mark.parametrize(
    ("drafter", "slots", "chunk"),
    [("suffix", 1, 7), ("lookahead", AT_ONCE, 5), ("none", AT_ONCE, 3), ("trees", AT_ONCE, 512)],
)
def test_tokens_are_those_of_plain_decoding(kind: str, drafter: str, slots: int, chunk: int) -> None:
    assert model(kind).target.bit_exact
    assert all(len(set(tokens)) > 5 for tokens in plain(kind)), "the random model loops"
    trees = RandomTrees(dict(zip(map(tuple, PROMPTS), plain(kind), strict=True)))
    assert decode(kind, trees if drafter == "trees" else drafter, slots, chunk) == plain(kind)
    assert drafter != "trees" or len(trees.scattered) > 10
