"""GGUF files by outpace's own functions: families, names, orders of rows, settings; what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from outpace.native.layers import functions
from outpace.targets import Rows, of_file

gguf = pytest.importorskip("gguf", reason="needs outpace[gguf]")
from gguf_models import write_file  # noqa: E402

pytestmark = pytest.mark.skipif(isinstance(functions(torch.float32), str), reason="nothing is compiled here")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WIDE = {"head_dim": 64}
# Family -> entries of its config, and values in the file that transformers' mapping does not read.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"rope.dimension_count": 32}),
    "mistral": ({"sliding_window": None}, {}),
    "qwen2": ({}, {}),
    "qwen3": (WIDE, {"attention.key_length": 64, "attention.value_length": 64}),
    "gemma2": (
        {**WIDE, "sliding_window": 12, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 256},
        {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": ({**WIDE, "sliding_window": 12, "num_hidden_layers": 7, "query_pre_attn_scalar": 256}, {}),
    "phi3": ({"sliding_window": 20}, {"attention.sliding_window": 20}),
    "starcoder2": ({"sliding_window": None}, {"rope.freq_base": 10000.0}),
    "stablelm": ({"partial_rotary_factor": 0.25}, {"rope.dimension_count": 8}),
}


@cache
def model(family: str) -> Any:
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family][0]})
    made = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight + 0.3 * noise if weight.dim() == 1 else 0.1 * noise)
    return made


@torch.inference_mode()
def logits(target: Any, tokens: list[int]) -> torch.Tensor:
    cache = target.new_cache()
    slot = target.open(cache, None)
    found: torch.Tensor = target.forward(cache, {slot: Rows(tokens)}).logits_of(slot)
    return found.clone()


TEXT = [(7 * place * place + 3) % 97 for place in range(40)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_that_it_was_written_from(family: str, tmp_path: Path) -> None:
    path = write_file(model(family), tmp_path / "model.gguf", more=FAMILIES[family][1])
    target = of_file(path, others=False, check=True)
    assert (
        target.plan.native and target.dtype == torch.float32 and target.plan.packed == {"f32": 7 * 3 + 1}
    ) or family
    with torch.inference_mode():
        right = model(family)(torch.tensor([TEXT])).logits[0]
    assert (logits(target, TEXT) - right).abs().max() < 1e-3 * right.abs().max()
