"""Every other family of text alone, by its type: served with a small model made of the names in its config.

``every_type.py`` has the types that read images or sound too, and those that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.family import COMMON


def each(types: str, value: Any) -> dict[str, Any]:
    """Each of these types, and a value for all."""
    return dict.fromkeys(types.split(), value)


ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**ROPE, "mrope_section": [2, 1, 1]}
# Type -> entries of its config that replace those found by name.
TINY: dict[str, Mapping[str, Any]] = {
    **each(
        """
        afmoe apertus apertus1p5_text arcee aria_text axk1 beam bert bert-generation big_bird
        bigbird_pegasus biogpt bitnet blenderbot blenderbot-small codegen cohere cohere2_moe ctrl
        diffllama electra ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint
        gemma glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt_bigcode
        gpt_neox_japanese gptj granite_swa granitemoe granitemoe_swa granitemoeshared helium
        hrm_text hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna marian mbart
        megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral3 mvp
        nanochat olmo olmo3 olmoe pegasus persimmon phi phimoe plbart qwen2_moe rembert roc_bert
        roformer sarvam_mla sarvam_moe seed_oss solar_open trocr vaultgemma whisper xglm youtu
        """,
        {},
    ),
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": MROPE},
        "head_dim": 8,
    },
    "cwm": {"bos_token_id": "default", "eos_token_id": "default"},
    "dbrx": {
        "rope_parameters": ROPE,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"topk_method": "greedy", "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    },
    "gemma4_text": {
        "only": {
            **COMMON,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
        }
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "longcat_flash": {
        "only": {
            **COMMON,
            "num_key_value_heads": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "num_layers": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        }
    },
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
}
# Without a table of inputs for each layer.
TINY["gemma4_unified_text"] = {
    "only": {
        name: entry
        for name, entry in TINY["gemma4_text"]["only"].items()
        if not name.endswith("_per_layer_input")
    }
}
# Those that take chains only.
CHAINED = {
    *each(
        "bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart roformer trocr whisper "
        "llama4 moss_transcribe_diarize vibevoice_asr",
        None,
    )
}
# Those whose layers' states drafters with trained parts cannot read.
SEVERAL_STATES = {"gemma3n", "gemma3n_text"}
# Those of which one case is quick: other norms, positions, experts, heads, or kinds of layers than elsewhere.
QUICK = {
    "bert", "blenderbot", "cohere", "diffllama", "ernie4_5_moe", "exaone4", "gemma3n_text",
    "gemma4_text", "glm4_moe", "gptj", "hunyuan_v1_moe", "jetmoe", "longcat_flash", "mimo_v2_flash",
    "minimax_m2", "olmo3", "phi", "seed_oss",
}  # fmt: skip
