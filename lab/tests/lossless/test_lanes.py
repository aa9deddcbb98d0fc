"""The laboratory's drafters, and a pair, for sequences of very different lengths in separate lanes."""

from __future__ import annotations

import pytest

from devices import DEVICES
from lossless import test_lanes
from lossless.test_lanes import GREEDY, PROMPTS, SAMPLED, decode, llama
from models import tiny_llama
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget, TargetModel
from outpace_lab.targets import ContrastiveTarget
from parts import in_turn

windows = test_lanes.windows  # a fixture


def pair(device: str) -> TargetModel:
    return ContrastiveTarget(llama(device), CausalTarget(tiny_llama(vocabulary=32, seed=1).to(device)))


CASES = {
    "a window": (llama, "windowed:sinks=1,recent=4,num_speculative_tokens=2"),
    "some layers": (llama, "self_speculative:skip=1,num_speculative_tokens=2"),
    "in two parts": (llama, "early_exit:layers=1,num_speculative_tokens=2,min_confidence=0"),
    "a pair, prompt lookup": (pair, "prompt_lookup"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "params"), in_turn(CASES, [GREEDY, SAMPLED]))
def test_tokens_are_those_of_each_alone(
    windows: list[int], case: str, params: SamplingParams, device: str
) -> None:
    make, drafter = CASES[case]
    target = make(device)
    alone = [Engine(target).generate([prompt], params)[0].tokens for prompt in PROMPTS]
    windows.clear()
    assert decode(target, drafter, params) == alone
    assert max(windows) > 1
