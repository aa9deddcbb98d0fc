"""Engines of a model whose weights change: texts that begin afterwards are computed with the new ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

from changing import WRITES, by_adding, in_place, made
from outpace import AsyncEngine, OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget
from parts import in_turn

PROMPT = [3, 6, 7, 11] * 20  # two blocks of the prefix cache
GREEDY = SamplingParams(8, ignore_eos=True)
STEPS = {"as it is": {"plan": "stock"}, "rounded": {"quantise": "int8", "plan": "exact"}}
NAME = "model.layers.0.mlp.down_proj.weight"


def engine(model: Any, steps: str) -> Engine:
    return Engine(CausalTarget(model, check=False, **STEPS[steps]), "prompt_lookup", prefix_cache=1 << 24)


def answer(of: Engine) -> list[int]:
    return list(of.generate([PROMPT], GREEDY)[0].tokens)


@pytest.mark.parametrize(("write", "steps"), in_turn(WRITES, STEPS))
def test_rows_of_a_prefix_are_not_used_with_other_weights(steps: str, write: Any) -> None:
    """Also where steps run the model itself, and hold no copy."""
    model = made(torch.bfloat16, layers=2)
    of = engine(model, steps)
    assert answer(of) == answer(of)
    for name in (NAME, "model.embed_tokens.weight"):
        write(model, name)
        assert answer(of) == answer(engine(model, steps))


def test_prefixes_are_shared_until_weights_change() -> None:
    model = made(torch.bfloat16)
    of = engine(model, "rounded")
    cached = [of.generate([PROMPT], GREEDY)[0].stats.cached_tokens for _ in range(3)]
    by_adding(model, NAME)
    cached += [of.generate([PROMPT], GREEDY)[0].stats.cached_tokens for _ in range(2)]
    assert cached == [0, 64, 64, 0, 64]


@pytest.mark.parametrize("write", [by_adding, in_place])
@pytest.mark.parametrize("steps", STEPS)
def test_a_text_that_was_begun_with_other_weights_leaves_no_prefix(steps: str, write: Any) -> None:
    model = made(torch.bfloat16, layers=2)
    of = engine(model, steps)
    first = of.add(PROMPT, SamplingParams(40, ignore_eos=True))
    of.step()
    write(model, NAME)
    of.step()
    other = of.add(PROMPT[::-1], GREEDY)
    while other.finish_reason is None or first.finish_reason is None:
        of.step()
    for done in (first, other):
        of.remove(done)
    found = of.generate([PROMPT], GREEDY)[0]
    assert found.stats.cached_tokens == 0 and list(found.tokens) == answer(engine(model, steps))


def test_an_engine_refuses_a_model_whose_modules_were_replaced() -> None:
    model = made(torch.bfloat16)
    for cached in (None, 1 << 24):
        of = Engine(CausalTarget(model, check=False, quantise="int8"), "none", prefix_cache=cached)
        answer(of)
        model.model.layers[0].mlp.down_proj = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
        with pytest.raises(OutpaceError, match="make a new target and engine"):
            answer(of)


def test_calls_of_an_engine_in_a_thread_follow_the_weights() -> None:
    async def run() -> None:
        model = made(torch.bfloat16)
        async with AsyncEngine(engine(model, "rounded")) as served:
            before = (await served.generate(PROMPT, GREEDY)).tokens
            by_adding(model, NAME)
            after = (await served.generate(PROMPT, GREEDY)).tokens
        assert list(after) == answer(engine(model, "rounded")) and after != before

    asyncio.run(run())
