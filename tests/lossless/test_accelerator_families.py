"""Families on an emulated accelerator, whose attention, masks or experts differ: the CPU's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerator import Accelerator, Placed
from models import tiny_llama
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget
from zoo.families import FAMILIES

PROMPTS = [[5, 9, 2, 7, 7, 1, 30, 4, 11, 12, 7, 7], [3, 7]]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
LOOKAHEAD = "lookahead:window=3,ngram=3,guesses=2"
# Windows and soft caps, fused projections, mixtures of experts; all others are slow.
NAMES = ["gemma2", "phi3", "mixtral"]
OTHERS = [name for name in FAMILIES if name not in NAMES]


def tokens(target: Any) -> list[list[int]]:
    engine = Engine(target, LOOKAHEAD, slots=2, adaptive=False)
    return [one.tokens for one in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_family_has_the_cpus_tokens(name: str) -> None:
    """With graphs by default, and launched one by one."""
    model = FAMILIES[name].build()
    expected = tokens(CausalTarget(model, check=False))
    with Accelerator("cuda"):
        model.to("cuda:0")
        target = CausalTarget(model, check=False)
        assert tokens(target) == expected
        assert not target.plan.no_graphs and target.plan.layouts["fixed"]
        assert tokens(CausalTarget(model, static=False, check=False)) == expected


@pytest.mark.slow  # kernels in Triton's interpreter
def test_bit_exact_steps_have_the_cpus_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.targets.cpu.linear.Tensor", Placed)  # weights of the emulator's own type
    model = tiny_llama(dtype=torch.float32, layers=1)
    expected = tokens(CausalTarget(model, check=False))
    with Accelerator("cuda"):
        target = CausalTarget(model.to("cuda:0"), exact=True, check=False)
        assert target.plan.name == "invariant" and target.options.static == "auto"
        assert tokens(target) == expected
        assert target.plan.layouts["fixed"]
