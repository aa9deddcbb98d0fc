"""Forwards in one call of C, by recipe: layers are the stock ones, and a row has the same bits anywhere."""

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
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.engine.engine import Engine
from outpace.native import build, move
from outpace.native import layers as native_module
from outpace.native.layers import functions
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch
from outpace.targets.cpu.linear import linears_of
from outpace.targets.cpu.trials import using_threads
from outpace.targets.native.fitting import why_not_native
from outpace.targets.native.recipe import RECIPES
from parts import first, in_turn
from paths import random_tree

HERE = not isinstance(functions(torch.float32), str)
pytestmark = pytest.mark.skipif(not HERE, reason=f"nothing is compiled here: {functions(torch.float32)}")

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 119,  # no multiple of a vector
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SQUARE = {"hidden_size": 192}  # for families whose heads fill the hidden size
KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 40}
# Name -> entries of a config: what a family has beside Llama's form.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {**KINDS, "logit_scale": 0.3},
    "gemma2": {
        **KINDS,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**KINDS, "query_pre_attn_scalar": 24},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_neox": {**SQUARE, "num_key_value_heads": 6, "rotary_pct": 0.25},
    "gpt_neox in turn": {**SQUARE, "num_key_value_heads": 6, "use_parallel_residual": False},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    },
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "llama with wide heads": {"head_dim": 96},
    "mistral": {"sliding_window": 40, "head_dim": 64},
    "olmo2": {},
    "olmo3": KINDS,
    "phi3": {**SQUARE, "sliding_window": 40},
    "qwen2": {**SQUARE, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 6},
    "smollm3": {**SQUARE, "no_rope_layers": [1, 0, 1]},
    "stablelm": {**SQUARE, "partial_rotary_factor": 0.25, "use_qkv_bias": True},
    "stablelm in parallel": {**SQUARE, "use_parallel_residual": True},
    "starcoder2": {**SQUARE, "sliding_window": 40},
}
DTYPES = [torch.float32, torch.bfloat16]


@cache
def model(family: str, dtype: torch.dtype) -> Any:
    kind = family.split()[0]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **FAMILIES[family]}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight += 0.3 * noise  # norms begin as ones or zeros, biases as zeros
            else:
                weight.copy_(noise * 0.1)  # for attention that is not nearly uniform
    return made.to(dtype).eval()


@cache
def target(family: str, dtype: torch.dtype) -> CausalTarget:
    """With the self-test, which compares every layer with the stock one, given the very same inputs."""
    return CausalTarget(model(family, dtype), exact=True, check=True)


def text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_each_recipe_is_tested() -> None:
    assert {family.split()[0] for family in FAMILIES} == set(RECIPES)


def tree_logits(of: CausalTarget, context: int, size: int) -> Iterator[tuple[list[int], Tensor]]:
    """Paths of a tree after a text, beside another sequence of another length, and the logits along each."""
    cache = of.new_cache(slots=2, length=64)
    slots, beside = [cache.allocate(), cache.allocate(3000)], text(21, seed=2)
    prompt = text(context)
    for start in range(0, context, 33):
        feeds = {slots[0]: Rows(prompt[start : start + 33])}
        if not start:
            feeds[slots[1]] = Rows(beside)
        of.forward(cache, Batch.of(feeds, None))
        cache.keep({slot: range(len(rows.tokens)) for slot, rows in feeds.items()})
    parents, paths = random_tree(size, context)
    nodes = text(size, seed=1)
    feeds = {slots[1]: Rows(text(3, seed=3)), slots[0]: Rows(nodes, tuple(parents))}
    logits = of.forward(cache, Batch.of(feeds)).logits_of(slots[0]).clone()
    for path in paths:
        yield [nodes[node] for node in path], logits[path]


@pytest.mark.parametrize(("family", "context"), in_turn(FAMILIES, [70, 3, 200]))
def test_logits_are_those_of_the_stock_model(family: str, context: int) -> None:
    of = target(family, torch.float32)
    assert of.plan.name == "native" and of.plan.packed == {"compiled": len(linears_of(of.model))}
    prompt = text(context)
    for path, logits in tree_logits(of, context, 13):
        with torch.inference_mode():
            expected = of.model(input_ids=torch.tensor([prompt + path])).logits[0, context:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.std()))


@pytest.mark.parametrize(("family", "context"), in_turn(FAMILIES, [3, 70, 200]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_nodes_of_a_tree_have_the_bits_of_plain_decoding(
    family: str, context: int, dtype: torch.dtype
) -> None:
    of = target(family, dtype)
    assert of.bit_exact
    cache = of.new_cache()
    slot = cache.allocate()
    of.forward(cache, Batch.of({slot: text(context)}, None))
    cache.keep({slot: range(context)})
    for path, logits in tree_logits(of, context, 13):
        with cache.provisional():
            for token, expected in zip(path, logits, strict=True):
                assert torch.equal(of.forward(cache, Batch.of({slot: [token]})).logits_of(slot)[0], expected)
                cache.keep({slot: [0]})


@pytest.mark.parametrize("family", ["gemma2", "olmo3", "cohere2", "gpt_neox"])
def test_bits_do_not_depend_on_the_number_of_threads(family: str) -> None:
    of, found = target(family, torch.bfloat16), []
    for threads in (1, 2, 5):
        with using_threads(threads):
            found.append([logits for _, logits in tree_logits(of, 200, 40)])
    for shared in found[1:]:
        assert all(map(torch.equal, found[0], shared))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "granite", "starcoder2"])
def test_hidden_states_inputs_and_subsets_of_layers_are_the_models(family: str) -> None:
    own = model(family, torch.float32)
    of, tokens = target(family, torch.float32), text(50)
    with torch.inference_mode():
        expected = own(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        embedded = own.get_input_embeddings()(torch.tensor(tokens))
    cache = of.new_cache()
    slot = cache.allocate()
    output = of.forward(cache, Batch.of({slot: tokens}), [0, 1, 2, -1])
    for layer, states in output.hidden[slot].items():
        right = expected.hidden_states[layer][0]
        torch.testing.assert_close(states, right, rtol=1e-3, atol=1e-3 * float(right.std()))
    logits = output.logits_of(slot).clone()
    given = of.run(cache, Batch.of({slot: tokens}), states={slot: embedded}).logits_of(slot)
    assert torch.equal(given, logits)
    bare = of.some_layers([0, 1, 2], bare=True)
    own_cache = bare.new_cache()
    found = bare.forward(own_cache, Batch.of({own_cache.allocate(): tokens})).logits
    states = of.forward(cache, Batch.of({slot: tokens}), [0, 1, 2]).hidden[slot]
    assert found is not None and found.shape == states[0].shape


def test_positions_beyond_the_first_table_have_angles_of_their_own() -> None:
    of, tokens = target("llama", torch.float32), text(700)
    with torch.inference_mode():
        expected = of.model(input_ids=torch.tensor([tokens])).logits[0, -1]
    cache = of.new_cache()
    slot = cache.allocate()
    of.forward(cache, Batch.of({slot: tokens[:5]}, None))
    cache.keep({slot: range(5)})
    found = of.forward(cache, Batch.of({slot: tokens[5:]})).logits_of(slot)[-1]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.std()))


def test_inputs_follow_their_sequences_into_the_order_of_a_lane() -> None:
    of = target("llama", torch.float32)
    cache = of.new_cache(slots=2, length=64)
    first, second = cache.allocate(), cache.allocate()
    texts = {second: text(7), first: text(4, seed=1)}
    embed = of.model.get_input_embeddings()
    states = {slot: embed(torch.tensor(tokens)).detach() for slot, tokens in texts.items()}
    feeds = {slot: Rows(tokens) for slot, tokens in texts.items()}
    expected = of.forward(cache, Batch.of(feeds))
    logits = [expected.logits_of(slot).clone() for slot in texts]
    found = of.run(cache, Batch.of(feeds), states=states)
    assert all(torch.equal(found.logits_of(slot), own) for slot, own in zip(texts, logits, strict=True))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_part_of_the_committed_rows_is_hidden(family: str) -> None:
    """Only sinks and the most recent rows, beside a sliding window too: stock attention with that mask."""
    of = target(family, torch.float32)
    part, prompt, nodes = of.over_window(2, 7), text(60), text(3, seed=1)
    stock = CausalTarget(of.model, stock=True, check=False).over_window(2, 7)
    found = []
    for some in (part, stock):
        cache = of.new_cache()
        slot = cache.allocate()
        some.forward(cache, Batch.of({slot: prompt}, None))
        cache.keep({slot: range(60)})
        found.append(some.forward(cache, Batch.of({slot: Rows(nodes, (-1, 0, 0))})).logits_of(slot).clone())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3 * float(found[1].std()))


def test_a_row_that_is_not_finite_spoils_no_other_sequence() -> None:
    of = CausalTarget(tiny(), plan="native", check=False)
    expected = [logits for _, logits in tree_logits(of, 20, 5)]
    cache = of.new_cache(slots=2, length=64)
    slots = [cache.allocate(), cache.allocate()]
    prompts = dict(zip(slots, (text(20), text(21, seed=2)), strict=True))
    of.forward(cache, Batch.of(prompts, None))
    cache.keep({slot: range(len(prompt)) for slot, prompt in prompts.items()})
    for buffer in cache._lanes[0].buffers:
        buffer[:, 1] = torch.nan  # the second sequence's rows
    parents, paths = random_tree(5, 20)
    feeds = {slots[0]: Rows(text(5, seed=1), tuple(parents)), slots[1]: Rows(text(3, seed=3))}
    output = of.forward(cache, Batch.of(feeds))
    assert all(
        torch.equal(output.logits_of(slots[0])[path], one) for path, one in zip(paths, expected, strict=True)
    )
    assert output.logits_of(slots[1]).isnan().all()


def tiny(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("weight", ["mlp.up_proj", "self_attn.k_proj", "input_layernorm"])
def test_weights_that_are_written_to_are_followed(weight: str) -> None:
    own = tiny()
    of = CausalTarget(own, plan="native")
    [logits] = [logits for _, logits in tree_logits(of, 5, 1)]
    with torch.no_grad():
        own.model.layers[1].get_submodule(weight).weight.mul_(1.5)
    [after] = [logits for _, logits in tree_logits(of, 5, 1)]
    [anew] = [logits for _, logits in tree_logits(CausalTarget(own, plan="native"), 5, 1)]
    assert torch.equal(after, anew) and not torch.equal(after, logits)


def test_released_weights_are_not_needed() -> None:
    [expected] = [logits for _, logits in tree_logits(CausalTarget(tiny(), plan="native"), 5, 1)]
    own = tiny()
    of = CausalTarget(own, plan="native")
    assert of.release() and own.model.layers[0].self_attn.q_proj.weight.is_meta
    [found] = [logits for _, logits in tree_logits(of, 5, 1)]
    assert torch.equal(found, expected)
    part = of.some_layers([0])
    cache = part.new_cache()
    assert part.forward(cache, Batch.of({cache.allocate(): [5]})).logits is not None


@pytest.mark.parametrize("quantise", first(1, ["int4", "int8"]))
def test_rounded_weights(quantise: str) -> None:
    own = model("llama", torch.bfloat16)
    found, expected = (
        [logits for _, logits in tree_logits(CausalTarget(own, plan=plan, quantise=quantise), 30, 9)]
        for plan in ("native", "exact")
    )
    spread = torch.cat(expected).float().std()
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).square().mean().sqrt() < 0.05 * spread


def next_logits(of: CausalTarget) -> torch.Tensor:
    cache = of.new_cache(length=16)
    slot = cache.allocate()
    return of.forward(cache, Batch.of({slot: [5, 6, 7]})).logits_of(slot).clone()


@pytest.mark.parametrize(
    ("weight", "assigned"),
    in_turn(["mlp.up_proj", "self_attn.q_norm", "input_layernorm", "mlp.down_proj"], [False, True]),
)
def test_weights_that_are_replaced_take_effect(weight: str, assigned: bool) -> None:
    """By ``weight.data = ...``, or by another parameter, neither of which counts as a write."""
    own = copy.deepcopy(model("qwen3", torch.float32))
    of = CausalTarget(own, plan="native")
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
    return of.forward(cache, Batch.of({slot: prompt})).logits_of(slot)[-1].clone()


def test_a_joined_bias_that_is_modified_takes_effect_and_a_converted_model_is_refused() -> None:
    own = model.__wrapped__("llama", torch.float32)
    of = CausalTarget(own, plan="native")
    before = next_logits(of)
    with torch.no_grad():
        own.model.layers[0].self_attn.q_proj.bias += 1
    assert not torch.equal(next_logits(of), before)
    assert torch.equal(next_logits(of), next_logits(CausalTarget(own, plan="native")))
    own.to(torch.bfloat16)
    with pytest.raises(OutpaceError, match="new target after converting"):
        next_logits(of)


def test_drafted_tokens_are_those_of_plain_decoding() -> None:
    of = target("llama", torch.bfloat16)
    prompts = [text(12, seed) * 3 for seed in range(4)]
    params = SamplingParams(40, temperature=0.7, seed=3, ignore_eos=True)
    plain = [Engine(of, "none").generate([prompt], params)[0].tokens for prompt in prompts]
    for drafter in ("prompt_lookup:branches=2", "lookahead:window=4,ngram=4,guesses=4"):
        together = Engine(of, drafter).generate(prompts, params)
        assert [one.tokens for one in together] == plain


def test_what_is_not_native_is_refused_with_the_reason() -> None:
    for made, reason in (
        (tiny().double(), "no compiled steps in float64"),
        (tiny_llama(dtype=torch.float32), "multiple of 16"),
        (tiny(hidden_act="relu"), "its activation is relu"),
        (
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2)),
            "GPT2LMHeadModel",
        ),
        (
            transformers.OlmoForCausalLM(transformers.OlmoConfig(**SIZES)),
            "OlmoForCausalLM",
        ),
    ):
        with pytest.raises(UnsupportedModel, match=rf"has no native steps: .*{reason}.*; leave plan out"):
            CausalTarget(made.eval(), plan="native")
        assert reason in CausalTarget(made.eval()).plan.why_not("native")
    own = tiny()
    own.__class__ = type("Scaled", (transformers.LlamaForCausalLM,), {})  # its forward may do more
    assert CausalTarget(own).plan.why_not("native") == "there are no compiled steps for a Scaled"
    mixed = tiny().bfloat16()
    mixed.model.norm.float()
    assert why_not_native(mixed) == "its weights have several dtypes"
    hooked = tiny()
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert "hooks" in CausalTarget(hooked).plan.why_not("native")
    assert CausalTarget(tiny(), plan="exact").plan.why_not("native") == "plan='exact' asks for another"
    assert CausalTarget(tiny(), static=True).plan.why_not("native") == "its shapes are fixed"


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
    anew.setattr(sys, "platform", "freebsd14")
    assert "compiled functions are for Linux, macOS, Windows, not freebsd14" in str(compile_())
    assert library.suffix == ".so"


def test_a_compiler_that_fails_is_named_with_its_message(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'a.c: In function f:' >&2\necho 'a.c:1: error: no' >&2\nexit 3\n")
    script.chmod(0o755)
    anew.setenv("CC", str(script))
    assert str(native_module.functions(torch.float32)) == f"{script} could not compile them: a.c:1: error: no"
    assert not any((tmp_path / "native").iterdir())
    assert shutil.which(str(script))
