"""On an accelerator every drafter gives the CPU's tokens, within its budget of launches, reads and copies.

The accelerator is emulated (``accelerator.py``): "cuda", "mps", and a model on two devices of the first kind.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from accelerator import Accelerator, Counts
from lossless.accelerator_budgets import BUDGETS, Budget
from lossless.conftest import embedded, lab_on
from lossless.test_matrix import SPECS
from lossless.trained import with_trained
from outpace.core import SamplingParams
from outpace.draws.sampling import best_tokens
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget

TOKENS, PROMPTS = 10, 2
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=TOKENS),
    "sampled": SamplingParams(max_new_tokens=TOKENS, temperature=0.7, seed=3),
}
KINDS = {"cuda": ("cuda", 1), "mps": ("mps", 1), "two": ("cuda", 2)}
# Weights are rounded for drafts on a CPU alone.
DRAFTERS = {"none": "none"} | {name: spec for name, spec in SPECS.items() if "self" not in spec}
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


def decoded(kind: str, drafter: str, sampling: str, static: bool) -> tuple[list[list[int]], int]:
    """The tokens on an accelerator, and the number of steps that were counted: those after the first.

    Everything is decoded twice: what is captured and compiled in the first run is none of a step's costs.
    """
    lab, on = lab_on(dtype_on(kind)), accelerator(kind)
    with on:
        spec = with_trained(DRAFTERS[drafter])
        engine = Engine(target_on(kind, static), spec, adaptive=False, slots=PROMPTS, length=256)
        for _ in range(2):
            sequences = [engine.add(prompt, SAMPLINGS[sampling]) for prompt in lab.prompts[:PROMPTS]]
            engine.step()
            on.counts.clear()
            steps = 0
            while engine.sequences:
                engine.step()
                steps += 1
    return [sequence.output for sequence in sequences], max(steps, 1)


# Each drafter once, most on cuda with graphs, greedily; one sampled, where an interpreter runs the kernel of
# draws, one without graphs, one on mps, one on two devices. Others are slow, and so are chains of drafters
# whose trees are here or in test_graphs.py.
QUICK = {
    (drafter, *{
        "prompt_lookup": ("cuda", "sampled", True),
        "eagle, trees": ("cuda", "greedy", False),
        "mtp, trees": ("mps", "greedy", False),
        "hydra, by confidence": ("two", "greedy", True),
    }.get(drafter, ("cuda", "greedy", True)))
    for drafter in DRAFTERS.keys() - {"draft_model", "hydra", "mtp"}
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in product(DRAFTERS, KINDS, SAMPLINGS, (False, True))
]


@pytest.mark.parametrize(("drafter", "kind", "sampling", "static"), CASES)
def test_tokens_are_the_cpus_within_the_budget(drafter: str, kind: str, sampling: str, static: bool) -> None:
    found, steps = decoded(kind, drafter, sampling, static)
    assert found == plain(kind, sampling)
    if kind == "cuda":
        budget = BUDGETS[drafter][2 * static + list(SAMPLINGS).index(sampling)]
        check(accelerator(kind).counts, budget, steps)


def check(counts: Counts, budget: Budget, steps: int) -> None:
    """Fail with the lines of ours that most of what is over a budget comes from."""
    for name, most in budget._asdict().items():
        found = counts.per(steps)[name]
        assert found <= most, (
            f"{name}: {found:.1f} per step, of which the budget allows {most}:\n{counts.lines(name, steps)}"
        )


def test_a_budget_names_the_line() -> None:
    on = accelerator("cuda")
    with on:
        rows = torch.zeros(3).to("cuda:0")
        on.counts.clear()
        best_tokens(rows[None])
    with pytest.raises(AssertionError, match=r"reads: 0\.5 .*\n.*draws/sampling\.py:\d+ best_tokens"):
        check(on.counts, Budget(launches=9, reads=0, copies=0, blocking=0), 2)
