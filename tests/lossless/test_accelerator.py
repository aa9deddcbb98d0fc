"""On an accelerator every drafter gives the CPU's tokens, within its budget of launches, reads and copies.

The accelerator is emulated (``accelerator.py``): "cuda", "mps", and a model on two devices of the first kind.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from accelerator import Accelerator
from lossless.conftest import embedded, lab_on
from lossless.datastore import with_datastore
from lossless.test_matrix import SPECS
from lossless.trained import with_trained
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget

TOKENS, PROMPTS = 12, 2
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=TOKENS),
    "sampled": SamplingParams(max_new_tokens=TOKENS, temperature=0.7, seed=3),
}
KINDS = {"cuda": ("cuda", 1), "mps": ("mps", 1), "two": ("cuda", 2)}
DRAFTERS = {"none": "none", **SPECS}
_SPREAD = 2  # decoder layers on the first of two devices


def dtype_on(kind: str) -> torch.dtype:
    return torch.float32 if kind == "mps" else torch.float64


@lru_cache
def accelerator(kind: str) -> Accelerator:
    return Accelerator(*KINDS[kind])


@lru_cache
def plain(kind: str, sampling: str) -> list[list[int]]:
    """The CPU's tokens."""
    lab = lab_on(dtype_on(kind))
    found = Engine(lab.target).generate(lab.prompts[:PROMPTS], SAMPLINGS[sampling])
    return [one.tokens for one in found]


@lru_cache
def target_on(kind: str, static: bool) -> CausalTarget:
    """The embedded model on an accelerator; to be called within its context."""
    name, count = KINDS[kind]
    model: Any = embedded(dtype_on(kind))
    if count == 1:
        model.to(f"{name}:0")
    else:
        spread(model)
    return CausalTarget(model, static=static, check=False)


def spread(model: Any) -> None:
    """Move the layers from the third on, the norm and the head to another device, as a device map does."""
    accelerate = pytest.importorskip("accelerate")
    layers = {f"model.layers.{layer}": int(layer >= _SPREAD) for layer in range(len(model.model.layers))}
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, **layers, "model.norm": 1, "lm_head": 1}
    accelerate.dispatch_model(
        model,
        {name: f"cuda:{place}" for name, place in places.items()},
        main_device="cuda:0",
        force_hooks=True,
        skip_keys=model._skip_keys_device_placement,
    )


def decoded(kind: str, drafter: str, sampling: str, static: bool) -> list[list[int]]:
    lab = lab_on(dtype_on(kind))
    with accelerator(kind):
        spec = with_trained(with_datastore(DRAFTERS[drafter]))
        engine = Engine(target_on(kind, static), spec, adaptive=False, slots=PROMPTS, length=256)
        found = engine.generate(lab.prompts[:PROMPTS], SAMPLINGS[sampling])
    return [one.tokens for one in found]


COMBINATIONS = [
    (kind, sampling, static) for static in (False, True) for sampling in SAMPLINGS for kind in KINDS
]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_cpus(drafter: str, kind: str, sampling: str, static: bool) -> None:
    assert decoded(kind, drafter, sampling, static) == plain(kind, sampling)
