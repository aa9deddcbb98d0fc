"""GGUF files by outpace's own functions: families, names, orders of rows, settings; what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from outpace.core import OutpaceError, UnsupportedModel
from outpace.native.layers import functions
from outpace.targets import CausalTarget, Target, of_file
from outpace.targets.batch import Batch
from outpace.targets.gguf import GgufFile

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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA = {
    **WIDE,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
HYBRID = {
    "context_length": 256,
    "embedding_length": 128,
    "block_count": 3,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [3, 3, 2, 0],
    "full_attention_interval": 3,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "attention.recurrent_layers": [True, True, False],
}
# Family -> entries of its config, and values in the file that transformers' mapping does not read.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"rope.dimension_count": 32}),
    "mistral": ({"sliding_window": None}, {}),
    "qwen2": ({}, {}),
    "qwen3": (WIDE, {"attention.key_length": 64, "attention.value_length": 64}),
    "gemma2": (
        {**WIDE, "sliding_window": 12, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 64},
        {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": (
        {
            **WIDE,
            "sliding_window": 12,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 64,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
        {"rope.freq_base_swa": 5e3, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": ({"sliding_window": 20}, {"attention.sliding_window": 20}),
    "starcoder2": ({"sliding_window": None}, {"rope.freq_base": 10000.0}),
    "stablelm": ({"partial_rotary_factor": 0.25}, {"rope.dimension_count": 8}),
}


KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# Those without compiled steps.
STOCK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lfm2": (
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
        {"attention.head_count_kv": [0, 2, 0], "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "nemotron": (
        {"partial_rotary_factor": 0.5},
        {"rope.dimension_count": 16, "attention.layer_norm_epsilon": 1e-5},
    ),
    "gemma4_text": (
        {
            "num_hidden_layers": 4,
            "layer_types": KINDS,
            "head_dim": 32,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "sliding_window": 12,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 97,
            "final_logit_softcapping": 3.0,
        },
        {
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in KINDS],
            "attention.head_count_kv": [2, 1, 2, 1],
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.key_length_swa": 32,
            "attention.value_length_swa": 32,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 32,
            "feed_forward_length": [96, 96, 192, 192],
            "final_logit_softcapping": 3.0,
            "rope.dimension_count": 64,
            "rope.dimension_count_swa": 32,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        },
    ),
    "gpt2": ({}, {}),
    "bloom": ({}, {"attention.head_count_kv": 4, "context_length": 256, "feed_forward_length": 512}),
    "falcon": ({}, {"attention.head_count_kv": 1, "attention.layer_norm_epsilon": 1e-5}),
    "mamba": (
        {"intermediate_size": 256, "state_size": 8},
        {"attention.head_count": 0, "feed_forward_length": 0, "ssm.dt_b_c_rms": False},
    ),
    "mixtral": ({"num_local_experts": 4}, {"expert_count": 4, "expert_used_count": 2}),
    "qwen2_moe": (
        {**EXPERTS, "shared_expert_intermediate_size": 96},
        {"expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 96},
    ),
    "qwen3_moe": (
        {**EXPERTS, **WIDE, "norm_topk_prob": True},
        {"expert_feed_forward_length": 64, "attention.value_length": 64},
    ),
    "qwen3_5_text": (DELTA, HYBRID),
    "qwen3_5_moe_text": (
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 96},
        {
            **HYBRID,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "expert_shared_feed_forward_length": 96,
        },
    ),
}

# Those whose attention, too, gives a row the same bits in any forward.
EXACT = ("gemma4_text", "lfm2", "nemotron", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_text")
# Of the logits' size: rounding sends a row to other experts, and a state keeps its errors.
LIMITS = {"gemma4_text": 0.15, "mixtral": 0.3, "nemotron": 0.2, "qwen3_5_text": 0.3, "qwen3_5_moe_text": 0.3}


@cache
def model(family: str) -> Any:
    config = CONFIG_MAPPING[family](**{**SIZES, **(FAMILIES | STOCK)[family][0]})
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
    found: torch.Tensor = target.forward(cache, Batch.of({slot: tokens})).logits_of(slot)
    return found.clone()


TEXT = [(7 * place * place + 3) % 97 for place in range(40)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_that_it_was_written_from(family: str, tmp_path: Path) -> None:
    path = write_file(model(family), tmp_path / "model.gguf", more=FAMILIES[family][1])
    target = of_file(path, others=False, check=True)
    assert target.plan.native and target.dtype == torch.float32 and set(target.plan.packed) == {"f32"}
    with torch.inference_mode():
        right = model(family)(torch.tensor([TEXT])).logits[0]
    assert (logits(target, TEXT) - right).abs().max() < 1e-3 * right.abs().max()


@pytest.mark.parametrize("family", STOCK)
def test_other_families_run_on_transformers_steps_with_the_files_weights(family: str, tmp_path: Path) -> None:
    path = write_file(model(family), tmp_path / "model.gguf", more=STOCK[family][1])
    target = of_file(path, others=False, check=True, **({"exact": True} if family in EXACT else {}))
    assert not target.plan.native
    with torch.inference_mode():
        right = model(family)(torch.tensor([TEXT])).logits[0]
    assert (logits(target, TEXT) - right).abs().max() < 1e-3 * right.abs().max()


@pytest.mark.parametrize("family", [*FAMILIES, *STOCK])
def test_blocks_are_in_the_order_of_the_models_rows(family: str, tmp_path: Path) -> None:
    more = (FAMILIES | STOCK)[family][1]
    path = write_file(model(family), tmp_path / "model.gguf", lambda name: "q8_0", more=more)
    target = of_file(path, "float32", others=False, check=False)
    with torch.inference_mode():
        right = model(family)(torch.tensor([TEXT])).logits[0]
    assert (logits(target, TEXT) - right).abs().mean() < LIMITS.get(family, 0.05) * right.abs().mean()


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemma_scales_queries_by_another_size(family: str, layers: int, tmp_path: Path) -> None:
    """By a share of the hidden size, which files do not say: llama.cpp tells it from the number of layers."""
    values = {**FAMILIES[family][1], "block_count": layers}
    path = write_file(model(family), tmp_path / "model.gguf", more=values)
    assert GgufFile(path).config.query_pre_attn_scalar == 32


@pytest.mark.parametrize("scaling", [{}, {"rope.scaling.type": "linear"}])
def test_positions_are_divided(scaling: dict[str, Any], tmp_path: Path) -> None:
    path = write_file(model("llama"), tmp_path / "model.gguf", more={"rope.scaling.factor": 4.0, **scaling})
    slowed = AutoModelForCausalLM.from_config(model("llama").config).eval()
    slowed.load_state_dict(model("llama").state_dict())
    slowed.model.rotary_emb.inv_freq /= 4
    with torch.inference_mode():
        right = slowed(torch.tensor([TEXT])).logits[0]
    assert (logits(of_file(path, others=False), TEXT) - right).abs().max() < 1e-3 * right.abs().max()


@pytest.mark.parametrize("tensors", [1, 9])
def test_a_split_file_is_the_whole_one(tensors: int, tmp_path: Path) -> None:
    whole = of_file(write_file(model("qwen2"), tmp_path / "whole.gguf"), others=False)
    first = write_file(model("qwen2"), tmp_path / "model.gguf", split=tensors)
    assert len(list(tmp_path.glob("model-*.gguf"))) > 3
    found = of_file(first, others=False)
    assert not found.model.config.tie_word_embeddings, "the head is in another part than the config"
    assert torch.equal(logits(found, TEXT), logits(whole, TEXT))


def test_parts_of_different_files_are_refused(tmp_path: Path) -> None:
    first = write_file(model("qwen2"), tmp_path / "model.gguf", split=12)
    other = write_file(model("llama"), tmp_path / "other.gguf", split=12)
    last = min(tmp_path.glob("model-00002-*"))
    last.write_bytes(min(tmp_path.glob("other-00003-*")).read_bytes())
    with pytest.raises(OutpaceError, match=r"have \d+ tensors, and it has \d+; fetch them again"):
        of_file(first, others=False)
    assert other.exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"rope.scaling.type": "yarn"}, "its rope.scaling.type is yarn"),
        ({"attention.key_length": 64}, "no place|transformers' config leaves out|its layer"),
        ({"rope.dimension_count": 16}, "rope.dimension_count|its layer"),
        ({"logit_scale": 2.0}, "its logit_scale is 2.0"),
        ({"rope.freq_base_swa": 5e3}, "its rope.freq_base_swa is 5000.0"),
    ],
)
def test_a_setting_that_the_config_leaves_out_is_refused(
    more: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = write_file(model("qwen2"), tmp_path / "model.gguf", more=more)
    with pytest.raises(UnsupportedModel, match=told):
        of_file(path, others=False)


def test_frequencies_of_rotation_are_divided(tmp_path: Path) -> None:
    factors = torch.linspace(1.0, 9.0, 16)
    path = write_file(model("llama"), tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors})
    slowed = AutoModelForCausalLM.from_config(model("llama").config).eval()
    slowed.load_state_dict(model("llama").state_dict())
    slowed.model.rotary_emb.inv_freq /= factors
    with torch.inference_mode():
        right, other = (one(torch.tensor([TEXT])).logits[0] for one in (slowed, model("llama")))
    found = logits(of_file(path, others=False), TEXT)
    assert (found - right).abs().max() < 1e-3 * right.abs().max()
    assert (found - other).abs().max() > 1e-2 * other.abs().max()


def test_both_reasons_are_told_where_nothing_runs_a_file(tmp_path: Path) -> None:
    path = write_file(model("qwen2"), tmp_path / "model.gguf", more={"rope.scaling.type": "yarn"})
    try:
        Target(path)
    except OutpaceError as error:
        assert "outpace does not read" in str(error) and "nor does llama.cpp" in str(error)
    else:
        assert not isinstance(Target(path), CausalTarget)  # llama.cpp is installed, and runs it


def test_a_family_whose_files_no_test_compares_is_refused(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["t5"](d_model=64, d_kv=16, num_layers=1, vocab_size=97)
    path = write_file(AutoModelForSeq2SeqLM.from_config(config), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match="files of t5 are not among those"):
        of_file(path, others=False)


def test_a_mixture_without_a_tensor_of_its_experts_is_refused(tmp_path: Path) -> None:
    path = write_file(
        model("mixtral"),
        tmp_path / "model.gguf",
        more=STOCK["mixtral"][1],
        without="blk.1.ffn_up_exps.weight",
    )
    with pytest.raises(UnsupportedModel, match="a layer with experts has no tensor ffn_up_exps"):
        of_file(path, others=False)


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    whole = {"blk.1.ffn_up.weight": torch.ones(96, 128, dtype=torch.int8)}
    path = write_file(model("qwen2"), tmp_path / "model.gguf", tensors=whole)
    with pytest.raises(UnsupportedModel, match="tensors of ggml's type 24 are not read"):
        of_file(path, others=False)


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    path = write_file(model("qwen2"), tmp_path / "model.gguf", without="blk.1.ffn_down.weight")
    with pytest.raises(
        UnsupportedModel, match=r"it has no tensor for model\.layers\.1\.mlp\.down_proj\.weight"
    ):
        of_file(path, others=False)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = write_file(
        model("qwen2"), tmp_path / "model.gguf", tensors={"blk.1.ffn_down.weight": torch.ones(128, 64)}
    )
    with pytest.raises(UnsupportedModel, match=r"blk.1.ffn_down.weight is \[128, 64\], and its layer"):
        of_file(path, others=False)
