"""Drafts are lossless for weights rounded on loading: the tokens are those of plain decoding with them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from lossless.prompts import PROMPTS
from lossless.test_matrix import SPECS
from lossless.trained import with_trained
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.loading import Loaded, load
from parts import in_turn

AT_ONCE = 8
# One spec per class of drafter.
CLASSES = {spec.partition(":")[0]: spec for spec in reversed(SPECS.values())}


@cache
def model(quantise: str) -> Loaded:
    return load(None, "bfloat16", "cpu", quantise=quantise)


def params(new: int) -> list[SamplingParams]:
    """Greedy and sampled, in turns."""
    greedy = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return [replace(greedy, temperature=0.9 * (place % 2), seed=place) for place in range(AT_ONCE)]


def decode(quantise: str, drafter: str, slots: int, new: int) -> list[list[int]]:
    loaded = model(quantise)
    engine = Engine(loaded.target, drafter, adaptive=False, slots=slots)
    prompts = [loaded.encode(text) for text in PROMPTS[:AT_ONCE]]
    return [generation.tokens for generation in engine.generate(prompts, params(new))]


# A target in 4 bits has no rounded self.
_FEWEST = {"self": "int8", "either": "int8"}


@cache
def plain(quantise: str, new: int) -> list[list[int]]:
    return decode(quantise, "none", 1, new)


@pytest.mark.parametrize(
    ("drafter", "quantise", "new", "slots"),
    in_turn(
        [*((name, _FEWEST.get(name, "int4"), 8) for name in CLASSES), ("draft_model", "int8", 8)],
        [AT_ONCE, 1],
    )
    + [
        pytest.param(name, quantise, 96, slots, marks=pytest.mark.slow)
        for name in CLASSES
        for quantise in ("int8", "int4")
        for slots in (1, AT_ONCE)
        if quantise == "int8" or name not in _FEWEST
    ],
)
def test_tokens_are_those_of_plain_decoding_with_the_same_weights(
    drafter: str, quantise: str, new: int, slots: int
) -> None:
    assert model(quantise).target.bit_exact
    spec = with_trained(CLASSES[drafter])
    assert decode(quantise, spec, slots, new) == plain(quantise, new)


def test_the_weights_are_rounded() -> None:
    """The model is rounded; otherwise the test above would compare it with itself."""
    texts = {quantise: plain(quantise, 8) for quantise in ("int8", "int4")}
    assert texts["int8"] != texts["int4"]
    assert model("int4").target.plan.packed == {"int4": 36, "int8": 7}
    assert model("int8").target.plan.packed == {"int8": 43}
