"""Forwards of fixed shapes give the tokens of plain decoding, also in two parts, or of some layers."""

from __future__ import annotations

import pytest

from devices import DEVICES
from list_target import ListTarget
from lossless.test_static import SAMPLINGS, alone, fixed, llama, run, runner_of_target
from outpace.core import OutpaceError
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget
from outpace_lab.targets import ContrastiveTarget

SPECS = [
    "self_speculative:skip=1",
    "early_exit:layers=1,num_speculative_tokens=2,min_confidence=0",
    "parallel_tokens",
    "token_recycling",
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS)
def test_tokens_are_those_of_plain_decoding(spec: str, device: str) -> None:
    params = SAMPLINGS["sampled"]
    expected = alone(CausalTarget(llama(device), check=False), params)
    target = fixed(device)
    engine = Engine(target, spec, slots=4, length=64, adaptive=False, prefill_chunk=4)
    assert run(engine, params) == expected
    assert runner_of_target(target).captures > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_pair(device: str) -> None:
    params = SAMPLINGS["sampled"]
    expected = alone(
        ContrastiveTarget(*(CausalTarget(llama(device, s), check=False) for s in (0, 1))), params
    )
    both = ContrastiveTarget(fixed(device), fixed(device, 1))
    assert run(Engine(both, "prompt_lookup", slots=4, length=64, adaptive=False), params) == expected


@pytest.mark.parametrize("spec", SPECS[:2])
def test_a_backend_without_layers_is_refused(spec: str) -> None:
    with pytest.raises(OutpaceError):
        Engine(ListTarget(), spec)
