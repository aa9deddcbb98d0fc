"""Forwards in one call of C, by recipe: each layer is the stock one's, and a row has the same bits anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from outpace.native.layers import functions
from outpace.targets import CausalTarget, Rows
from outpace.targets.cpu.linear import linears_of
from outpace.targets.cpu.trials import using_threads
from outpace.targets.native.recipe import RECIPES
from parts import in_turn
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
    "gemma2": {**KINDS, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
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
    slots, beside = [cache.allocate(), cache.allocate(600)], text(21, seed=2)
    prompt = text(context)
    for start in range(0, context, 33):
        feeds = {slots[0]: Rows(prompt[start : start + 33])}
        if not start:
            feeds[slots[1]] = Rows(beside)
        of.forward(cache, feeds, logits_from=None)
        cache.keep({slot: range(len(rows.tokens)) for slot, rows in feeds.items()})
    parents, paths = random_tree(size, context)
    nodes = text(size, seed=1)
    feeds = {slots[1]: Rows(text(3, seed=3)), slots[0]: Rows(nodes, tuple(parents))}
    logits = of.forward(cache, feeds).logits_of(slots[0]).clone()
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
    of.forward(cache, {slot: Rows(text(context))}, logits_from=None)
    cache.keep({slot: range(context)})
    for path, logits in tree_logits(of, context, 13):
        with cache.provisional():
            for token, expected in zip(path, logits, strict=True):
                assert torch.equal(of.forward(cache, {slot: Rows([token])}).logits_of(slot)[0], expected)
                cache.keep({slot: [0]})


@pytest.mark.parametrize("family", ["gemma2", "olmo3", "cohere2", "gpt_neox"])
def test_bits_do_not_depend_on_the_number_of_threads(family: str) -> None:
    of, found = target(family, torch.bfloat16), []
    for threads in (1, 2, 5):
        with using_threads(threads):
            found.append([logits for _, logits in tree_logits(of, 200, 40)])
    for shared in found[1:]:
        assert all(map(torch.equal, found[0], shared))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "granite", "gpt_neox"])
def test_hidden_states_inputs_and_subsets_of_layers_are_the_models(family: str) -> None:
    own = model(family, torch.float32)
    of, tokens = target(family, torch.float32), text(50)
    with torch.inference_mode():
        expected = own(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        embedded = own.get_input_embeddings()(torch.tensor(tokens))
    cache = of.new_cache()
    slot = cache.allocate()
    output = of.forward(cache, {slot: Rows(tokens)}, hidden_layers=[0, 1, 2, -1])
    for layer, states in output.hidden[slot].items():
        right = expected.hidden_states[layer][0]
        torch.testing.assert_close(states, right, rtol=1e-3, atol=1e-3 * float(right.std()))
    logits = output.logits_of(slot).clone()
    given = of.run(cache, {slot: Rows(tokens)}, states={slot: embedded}).logits_of(slot)
    assert torch.equal(given, logits)
    bare = of.some_layers([0, 1, 2], bare=True)
    own_cache = bare.new_cache()
    found = bare.forward(own_cache, {own_cache.allocate(): Rows(tokens)}).logits
    states = of.forward(cache, {slot: Rows(tokens)}, hidden_layers=[0, 1, 2]).hidden[slot]
    assert found is not None and found.shape == states[0].shape


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_part_of_the_committed_rows_is_hidden(family: str) -> None:
    """Sinks and the most recent rows alone, beside a sliding window too: as stock attention with that mask."""
    of = target(family, torch.float32)
    part, prompt, nodes = of.over_window(2, 7), text(60), text(3, seed=1)
    stock = CausalTarget(of.model, stock=True, check=False).over_window(2, 7)
    found = []
    for some in (part, stock):
        cache = of.new_cache()
        slot = cache.allocate()
        some.forward(cache, {slot: Rows(prompt)}, logits_from=None)
        cache.keep({slot: range(60)})
        found.append(some.forward(cache, {slot: Rows(nodes, (-1, 0, 0))}).logits_of(slot).clone())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3 * float(found[1].std()))
