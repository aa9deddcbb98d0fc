"""On a GPU forwards with branches run on the kernel for trees, all others on the model's own attention.

The GPU is emulated, and Triton's interpreter runs the kernel.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from accelerator import Accelerator
from lossless.conftest import embedded
from lossless.test_accelerator import spread
from models import tiny_llama
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch
from outpace.targets.gpu import tree_attention
from outpace.targets.inputs.masks import TREE
from outpace.targets.step import trees
from zoo.families import FAMILIES

tree_kernel = pytest.importorskip("outpace.targets.gpu.tree_kernel")

PROMPT = [3, 9, 2, 7]
CHAIN, BRANCHES = Rows([5, 6, 1, 4]), Rows([5, 6, 1, 4], (-1, 0, 0, 1))
LAYERS = 1
PARAMS = SamplingParams(max_new_tokens=5, ignore_eos=True)
LOOKAHEAD = "lookahead:window=3,ngram=3,guesses=2"


@lru_cache
def _made() -> Any:
    return tiny_llama(layers=LAYERS, dtype=torch.float32, context=512)


@pytest.fixture
def cuda() -> Iterator[Accelerator]:
    _made()  # random numbers ask a device for its generator
    with Accelerator("cuda") as on:
        yield on


def model() -> Any:
    return copy.deepcopy(_made()).to("cuda:0")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list to which each call of the kernel adds its number of rows."""
    found: list[Any] = []
    real = tree_kernel.tree_attention

    def counted(query: Any, *args: Any) -> Any:
        found.append(query.shape[2])
        return real(query, *args)

    monkeypatch.setattr(tree_kernel, "tree_attention", counted)
    return found


def logits(target: CausalTarget, *feeds: Rows) -> list[torch.Tensor]:
    """The logits of rows after a prompt, each without those before."""
    cache, found = target.new_cache(), []
    slot = cache.allocate()
    target.forward(cache, Batch.of({slot: PROMPT}, None))
    cache.keep({slot: range(len(PROMPT))})
    for rows in feeds:
        found.append(target.forward(cache, Batch.of({slot: rows})).logits_of(slot).clone().cpu())
        cache.keep({slot: ()})
    return found


def same(target: CausalTarget, *feeds: Rows) -> None:
    """Compare the logits with the CPU's."""
    torch.testing.assert_close(logits(target, *feeds), logits(on_cpu(), *feeds))


@lru_cache
def on_cpu() -> CausalTarget:
    return CausalTarget(copy.deepcopy(_made()), check=False)


def test_branches_take_the_kernel_and_nothing_else_does(cuda: Accelerator, calls: list[Any]) -> None:
    target = CausalTarget(model(), static=False, check=False)
    assert not target.plan.no_trees
    calls.clear()
    chain = Rows(CHAIN.tokens, range(-1, 3))
    chunk = Rows([1] * 130, (-1, *[0] * 129))
    same(target, Rows([5]), CHAIN, chain, chunk)
    assert not calls
    same(target, BRANCHES)
    assert calls == LAYERS * [4]


def test_graphs_of_branches_are_others(cuda: Accelerator, calls: list[Any]) -> None:
    """Of one width; each shape is run once and captured once."""
    target = CausalTarget(model(), check=False)
    calls.clear()
    same(target, CHAIN, BRANCHES, CHAIN, BRANCHES)
    assert calls == 2 * LAYERS * [4] and target.plan.layouts["fixed"] == 4


def test_warm_steps_have_branches_too(cuda: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's operations, which are quicker here
    monkeypatch.setattr(tree_attention, "why_no_triton", lambda: "off")
    target = CausalTarget(model(), check=False)
    engine = Engine(target, LOOKAHEAD, adaptive=False)
    engine.warm()
    before = captured(target)
    found = engine.generate([PROMPT], PARAMS)
    assert captured(target) == before and {key[-1] for key in before} == {False, True}
    plain = Engine(on_cpu(), "none").generate([PROMPT], PARAMS)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


def captured(target: CausalTarget) -> set[Any]:
    """The shapes that are captured, the last part of which tells those with branches."""
    assert target._fixed is not None
    return {key for shapes in target._fixed.known.values() for key in shapes}


def test_trees_launch_no_more_than_on_the_models_attention(cuda: Accelerator) -> None:
    target, counts = CausalTarget(model(), static=False, check=False), []
    for _ in range(2):
        cuda.counts.clear()
        logits(target, BRANCHES)
        counts.append(cuda.counts.per(1))
        target._modules.trees = None
    assert counts[0].pop("launches") < counts[1].pop("launches")
    assert counts[0] == counts[1]


def _attending_by(name: str) -> Any:
    def change(made: Any) -> Any:
        made.set_attn_implementation(name)
        return made

    return change


def _its_own_code(made: Any) -> Any:
    made._supports_attention_backend = False
    return made


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda made: made.double(), {}, "takes no torch.float64"),
        (lambda made: made, {"stock": True}, "as transformers runs them"),
        (_attending_by(TREE), {}, "all steps run on the kernel"),
        (_its_own_code, {}, "code of its own"),
    ],
)
def test_the_plan_has_the_reason(cuda: Accelerator, change: Any, options: Any, words: str) -> None:
    target = CausalTarget(change(model()), check=False, **options)
    assert target._modules.trees is None
    assert words in target.plan.no_trees
    assert re.search(f"trees +no kernel: .*{words}", str(target.plan))


def test_layers_on_two_devices_keep_their_attention() -> None:
    with Accelerator("cuda", 2):
        made = embedded(torch.float32)
        spread(made)
        assert CausalTarget(made, check=False).plan.no_trees == "layers are on 2 devices"


def test_without_triton_the_plan_says_so(cuda: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "why_no_triton", lambda: "pip install triton")
    target = CausalTarget(model(), static=False, check=False)
    assert "pip install triton" in target.plan.no_trees
    same(target, BRANCHES)


def test_a_kernel_that_the_self_test_disproves_is_not_used(
    cuda: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tree_kernel.tree_attention

    def wrong(query: Any, key: Any, value: Any, mask: Any, scale: float, *more: Any) -> Any:
        return real(query, key, value, mask.clamp(min=0, max=7), scale, *more)

    monkeypatch.setattr(tree_kernel, "tree_attention", wrong)
    target = CausalTarget(model(), static=False, check=True)
    assert "LlamaForCausalLM" in target.plan.no_trees and target._modules.trees is None
    same(target, BRANCHES)


def test_a_kernel_that_passes_the_self_test_is_used(cuda: Accelerator, calls: list[Any]) -> None:
    target = CausalTarget(model(), static=False, check=True)
    assert not target.plan.no_trees
    calls.clear()
    same(target, BRANCHES)
    assert calls


def test_weights_and_modules_that_change(cuda: Accelerator, calls: list[Any]) -> None:
    made = model()
    target = CausalTarget(made, static=False, check=False)
    made.lm_head.weight.data.mul_(2)
    target.renew()
    calls.clear()
    (found,), (before,) = logits(target, BRANCHES), logits(on_cpu(), BRANCHES)
    assert calls
    torch.testing.assert_close(found, 2 * before)
    made.model.norm = copy.copy(made.model.norm)
    calls.clear()
    logits(target, BRANCHES)
    assert not calls and "were replaced" in target.plan.no_trees


@pytest.mark.slow  # some seconds each
@pytest.mark.parametrize("name", FAMILIES)
def test_families_pass_on_the_kernel(name: str, calls: list[Any]) -> None:
    """Or the plan says why not."""
    made = FAMILIES[name].build().float()
    prompts = [PROMPT, [3, 7]]
    plain = Engine(CausalTarget(made, check=False), "none", slots=2).generate(prompts, PARAMS)
    with Accelerator("cuda"):
        target = CausalTarget(made.to("cuda:0"), static=False, check=True)
        calls.clear()
        found = Engine(target, LOOKAHEAD, slots=2, adaptive=False).generate(prompts, PARAMS)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert bool(calls) != bool(target.plan.no_trees)
