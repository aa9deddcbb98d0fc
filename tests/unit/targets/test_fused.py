"""Fused layers: the logits of the model's own layers, and for a row the same bits whatever goes with it."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.engine.engine import Engine
from outpace.native import build, move
from outpace.native import layers as native_module
from outpace.native.layers import functions
from outpace.targets import CausalTarget, Rows
from outpace.targets.cpu.fusible import why_not_fused
from outpace.targets.cpu.kernels import OneDNN
from outpace.targets.cpu.linear import linears_of
from outpace.targets.cpu.trials import unavailable, using_threads
from parts import first, in_turn
from paths import random_tree

HERE = not isinstance(functions(torch.float32), str)
pytestmark = pytest.mark.skipif(not HERE, reason=f"nothing is compiled here: {functions(torch.float32)}")

SIZES = {"vocab_size": 97, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "intermediate_size": 119},  # no multiple of a vector
    "Mistral": {"sliding_window": 40, "head_dim": 64},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "Qwen3": {"head_dim": 128, "num_key_value_heads": 6},
}
FAMILIES["wide heads"] = {"head_dim": 96}


@cache
def model(family: str, dtype: torch.dtype) -> Any:
    kind = "Llama" if family == "wide heads" else family
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **HEADS, **FAMILIES[family]})
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight += 0.3 * torch.randn_like(weight)  # they begin as ones and zeros
            else:
                weight *= 4  # for attention that is not nearly uniform
    return made.to(dtype).eval()


@cache
def target(family: str, dtype: torch.dtype) -> CausalTarget:
    return CausalTarget(model(family, dtype), fuse=True, exact=True)


def text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fed(of: CausalTarget, prompt: list[int], chunk: int, beside: list[int]) -> Any:
    """A cache with two texts, fed in chunks; its slots."""
    cache = of.new_cache(slots=2, length=64)
    slots = [cache.allocate(), cache.allocate()]
    for start in range(0, max(map(len, (prompt, beside))), chunk):
        feeds = {
            slot: Rows(own[start : start + chunk])
            for slot, own in zip(slots, (prompt, beside), strict=True)
            if own[start:]
        }
        of.forward(cache, feeds, logits_from=None)
        cache.keep({slot: range(len(rows.tokens)) for slot, rows in feeds.items()})
    return cache, slots


def tree_logits(of: CausalTarget, context: int, size: int) -> Iterator[tuple[list[int], Tensor]]:
    """Paths of a tree after a text, beside another sequence, and the logits along each."""
    parents, paths = random_tree(size, context)
    nodes = text(size, seed=1)
    cache, slots = fed(of, text(context), 33, text(21, seed=2))
    feeds = {slots[0]: Rows(nodes, tuple(parents)), slots[1]: Rows(text(3, seed=3))}
    logits = of.forward(cache, feeds).logits_of(slots[0]).clone()
    for path in paths:
        yield [nodes[node] for node in path], logits[path]


@pytest.mark.parametrize(("family", "context"), in_turn(FAMILIES, [200, 3, 70]))
def test_logits_are_those_of_the_models_own_layers(family: str, context: int) -> None:
    of = target(family, torch.float32)
    assert of.plan.fused and not of.plan.why_not("fused") and "fused" in of.identity
    prompt = text(context)
    for path, logits in tree_logits(of, context, 13):
        with torch.inference_mode():
            expected = of.model(input_ids=torch.tensor([prompt + path])).logits[0, context:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("family", "context"), in_turn(FAMILIES, [3, 70, 200]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nodes_of_a_tree_have_the_bits_of_plain_decoding(
    family: str, context: int, dtype: torch.dtype
) -> None:
    of = target(family, dtype)
    assert of.bit_exact
    for path, logits in tree_logits(of, context, 13):
        cache = of.new_cache()
        slot = cache.allocate()
        of.forward(cache, {slot: Rows(text(context))}, logits_from=None)
        cache.keep({slot: range(context)})
        for token, expected in zip(path, logits, strict=True):
            found = of.forward(cache, {slot: Rows([token])}).logits_of(slot)[0]
            assert torch.equal(found, expected)
            cache.keep({slot: [0]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_a_line_have_the_bits_of_padded_ones(dtype: torch.dtype) -> None:
    of = target("Llama", dtype)
    found = [logits for _, logits in tree_logits(of, 70, 13)]
    assert of._modules.line is not None
    line, of._modules.line = of._modules.line, None
    try:
        padded = [logits for _, logits in tree_logits(of, 70, 13)]
    finally:
        of._modules.line = line
    assert all(map(torch.equal, found, padded))


@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float32]))
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    of, found = target("Llama", dtype), []
    for threads in (1, 2, 3, 4, 7):
        with using_threads(threads):
            found.append([logits for _, logits in tree_logits(of, 500, 40)])
    for shared in found[1:]:
        assert all(map(torch.equal, found[0], shared))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_layer_of_a_bit_exact_step_is_left_to_a_librarys_kernel(family: str, dtype: torch.dtype) -> None:
    """Those split some sums by the number of threads, on some processors; it was inputs of an odd number."""
    of = target(family, dtype)
    assert of.plan.packed == {"compiled": len(linears_of(of.model))}


def test_a_row_that_is_not_finite_spoils_no_other_sequence() -> None:
    of = CausalTarget(tiny_fused(), fuse=True, check=False)
    expected = [logits for _, logits in tree_logits(of, 20, 5)]
    cache, slots = fed(of, text(20), 33, text(21, seed=2))
    for buffer in cache._lanes[0].buffers:
        buffer[:, 1] = torch.nan  # the second sequence's rows
    parents, paths = random_tree(5, 20)
    feeds = {slots[0]: Rows(text(5, seed=1), tuple(parents)), slots[1]: Rows(text(3, seed=3))}
    output = of.forward(cache, feeds)
    assert all(
        torch.equal(output.logits_of(slots[0])[path], one) for path, one in zip(paths, expected, strict=True)
    )
    assert output.logits_of(slots[1]).isnan().all()


def tiny_fused(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**SIZES, **HEADS, **changes})
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval()


def test_hidden_states_and_subsets_of_layers_are_those_of_the_model() -> None:
    own = tiny_fused(num_hidden_layers=3)
    of = CausalTarget(own, fuse=True)
    tokens = text(9)
    with torch.inference_mode():
        expected = own(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    cache = of.new_cache()
    slot = cache.allocate()
    output = of.forward(cache, {slot: Rows(tokens)}, hidden_layers=[0, 1, 2, -1])
    torch.testing.assert_close(output.logits_of(slot), expected.logits[0])
    for layer, states in output.hidden[slot].items():
        torch.testing.assert_close(states[: len(tokens)], expected.hidden_states[layer][0])
    part = of.some_layers([0, 2])
    whole = tiny_fused(num_hidden_layers=3)
    del whole.model.layers[1]
    whole.config.num_hidden_layers, whole.model.layers[1].self_attn.layer_idx = 2, 1
    cache = part.new_cache()
    slot = cache.allocate()
    with torch.inference_mode():
        logits = whole(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(part.forward(cache, {slot: Rows(tokens)}).logits_of(slot), logits)


@pytest.mark.parametrize("weight", ["mlp.up_proj", "self_attn.k_proj", "input_layernorm"])
def test_weights_that_are_written_to_are_followed(weight: str) -> None:
    own = tiny_fused()
    of = CausalTarget(own, fuse=True)
    [logits] = [logits for _, logits in tree_logits(of, 5, 1)]
    with torch.no_grad():
        own.model.layers[1].get_submodule(weight).weight.mul_(1.5)
    [after] = [logits for _, logits in tree_logits(of, 5, 1)]
    [anew] = [logits for _, logits in tree_logits(CausalTarget(own, fuse=True), 5, 1)]
    assert torch.equal(after, anew) and not torch.equal(after, logits)


def test_released_weights_are_not_needed() -> None:
    [expected] = [logits for _, logits in tree_logits(CausalTarget(tiny_fused(), fuse=True), 5, 1)]
    own = tiny_fused()
    of = CausalTarget(own, fuse=True, release=True)
    assert of.released and own.model.layers[0].self_attn.q_proj.weight.is_meta
    [found] = [logits for _, logits in tree_logits(of, 5, 1)]
    assert torch.equal(found, expected)
    part = of.some_layers([0])
    cache = part.new_cache()
    assert part.forward(cache, {cache.allocate(): Rows([5])}).logits is not None


@pytest.mark.parametrize("quantise", first(1, ["int4", "int8"]))
def test_rounded_weights_can_be_fused(quantise: str) -> None:
    own = model("Llama", torch.bfloat16)
    found, expected = (
        [logits for _, logits in tree_logits(CausalTarget(own, fuse=fuse, quantise=quantise), 30, 9)]
        for fuse in (True, False)
    )
    spread = torch.cat(expected).float().std()
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).square().mean().sqrt() < 0.05 * spread


@pytest.mark.parametrize("pack", first(1, [False, "oneDNN"]))
def test_products_of_other_kernels_can_be_fused(pack: Any) -> None:
    """One call runs all layers if their products are compiled; otherwise they are called one by one."""
    if pack and (why := unavailable(OneDNN(), torch.float32)):
        pytest.skip(why)
    for family in FAMILIES:
        own = model(family, torch.float32)
        of = CausalTarget(own, fuse=True, exact=False, pack=pack)
        assert of.plan.fused and of.plan.packed == ({pack: len(linears_of(own))} if pack else {})
        assert set(target(family, torch.float32).plan.packed) == {"compiled"}
        expected, found = (tree_logits(one, 70, 13) for one in (target(family, torch.float32), of))
        for (_, one), (_, other) in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-3)


def next_logits(of: CausalTarget) -> torch.Tensor:
    cache = of.new_cache(length=16)
    slot = cache.allocate()
    return of.forward(cache, {slot: Rows([5, 6, 7])}).logits_of(slot).clone()


@pytest.mark.parametrize(
    ("weight", "assigned"),
    in_turn(["mlp.up_proj", "self_attn.q_norm", "input_layernorm", "mlp.down_proj"], [False, True]),
)
def test_weights_that_are_replaced_take_effect(weight: str, assigned: bool) -> None:
    """By ``weight.data = ...``, or by another parameter, neither of which counts as a write."""
    own = copy.deepcopy(model("Qwen3", torch.float32))
    of = CausalTarget(own, fuse=True)
    name, prompt = f"model.layers.1.{weight}.weight", text(7)
    before = logits_after(of, prompt)
    changed = {name: own.state_dict()[name] * 1.5}
    if assigned:
        own.load_state_dict(changed, strict=False, assign=True)
    else:
        own.get_parameter(name).data = changed[name]
    expected = own(torch.tensor([prompt])).logits[0, -1]
    found = logits_after(of, prompt)
    assert torch.allclose(found, expected, atol=1e-3) and not torch.allclose(found, before, atol=1e-2)


def logits_after(of: CausalTarget, prompt: list[int]) -> Tensor:
    cache = of.new_cache()
    slot = cache.allocate()
    return of.forward(cache, {slot: Rows(prompt)}).logits_of(slot)[-1].clone()


def test_a_joined_bias_that_is_modified_takes_effect_and_a_converted_model_is_refused() -> None:
    own = model.__wrapped__("Llama", torch.float32)
    of = CausalTarget(own, fuse=True)
    before = next_logits(of)
    with torch.no_grad():
        own.model.layers[0].self_attn.q_proj.bias += 1
    assert not torch.equal(next_logits(of), before)
    assert torch.equal(next_logits(of), next_logits(CausalTarget(own, fuse=True)))
    own.to(torch.bfloat16)
    with pytest.raises(OutpaceError, match="new target after converting"):
        next_logits(of)


def test_drafted_tokens_are_those_of_plain_decoding() -> None:
    of = target("Llama", torch.bfloat16)
    prompts = [text(12, seed) * 3 for seed in range(4)]
    params = SamplingParams(40, temperature=0.7, seed=3, ignore_eos=True)
    plain = [Engine(of, "none").generate([prompt], params)[0].tokens for prompt in prompts]
    for drafter in ("prompt_lookup:branches=2", "lookahead:window=4,ngram=4,guesses=4"):
        together = Engine(of, drafter).generate(prompts, params)
        assert [one.tokens for one in together] == plain


def test_what_cannot_be_fused_is_refused_with_the_reason() -> None:
    for made, reason in (
        (tiny_fused().double(), "no compiled steps in torch.float64"),
        (tiny_llama(dtype=torch.float32), "multiple of 16"),
        (tiny_fused(hidden_act="gelu"), "its activation is gelu"),
        (
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2)),
            "plain stack",
        ),
        (
            transformers.OlmoForCausalLM(transformers.OlmoConfig(**SIZES, num_attention_heads=2)),
            "OlmoForCausalLM",
        ),
    ):
        with pytest.raises(UnsupportedModel, match=rf"cannot be fused: .*{reason}.*; leave fuse out"):
            CausalTarget(made.eval(), fuse=True)
        assert reason in CausalTarget(made.eval()).plan.why_not("fused")
    own = tiny_fused()
    own.__class__ = type("Scaled", (transformers.LlamaForCausalLM,), {})  # its forward may do more
    assert CausalTarget(own).plan.why_not("fused") == "there are no compiled steps for a Scaled"
    mixed = tiny_fused().bfloat16()
    mixed.model.norm.float()
    assert why_not_fused(mixed) == "its weights have several dtypes"
    hooked = tiny_fused()
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert "hooks" in CausalTarget(hooked).plan.why_not("fused")
    assert CausalTarget(tiny_fused(), pack=False).plan.why_not("fused") == "pack is off"
    assert CausalTarget(tiny_fused(), fuse=False).plan.why_not("fused") == "fuse is off"
    assert CausalTarget(tiny_fused(), static=True).plan.why_not("fused") == "its shapes are fixed"


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """An empty cache folder, with nothing compiled yet."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setattr(native_module, "functions", native_module.functions.__wrapped__)
    yield monkeypatch


def test_a_machine_without_a_compiler_says_so(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_ = move.functions.__wrapped__
    assert not isinstance(compile_(), str)
    [library] = (tmp_path / "native").iterdir()
    anew.setattr(build._Compiler, "library", lambda *_: pytest.fail("it was compiled before"))
    assert not isinstance(compile_(), str)
    anew.setenv("CC", "no-such-compiler")
    for said in (compile_(), native_module.functions(torch.float32)):
        assert "there is no program 'no-such-compiler'" in str(said)
    anew.setattr(sys, "platform", "darwin")
    assert "compiled functions are for Linux, not darwin" in str(compile_())
    assert library.suffix == ".so"


def test_a_compiler_that_fails_is_named_with_its_message(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'a.c: In function f:' >&2\necho 'a.c:1: error: no' >&2\nexit 3\n")
    script.chmod(0o755)
    anew.setenv("CC", str(script))
    assert str(native_module.functions(torch.float32)) == f"{script} could not compile them: a.c:1: error: no"
    assert not any((tmp_path / "native").iterdir())
    assert shutil.which(str(script))
