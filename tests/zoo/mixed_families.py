"""Families with experts, or with layers of several kinds of attention."""

from __future__ import annotations

from zoo.family import WINDOW, Family

_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

MIXED: dict[str, Family] = {
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        {"num_experts": 4, "head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, **_EXPERTS},
        sliding=True,
    ),
    "mixtral": Family(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        sliding=True,
    ),
    "gemma2": Family(
        "Gemma2Config",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": _MIXED_LAYERS,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        sdpa=False,
        sliding=True,
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": _MIXED_LAYERS,
        },
        sliding=True,
    ),
    "cohere2": Family(
        "Cohere2Config",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": _MIXED_LAYERS,
            "logit_scale": 1.0,
        },
        sliding=True,
    ),
    "smollm3": Family(
        "SmolLM3Config",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": _MIXED_LAYERS,
            "no_rope_layers": [1, 0, 1],
        },
        sliding=True,
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": _MIXED_LAYERS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        sdpa=False,
        sliding=True,
        seed=1,
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            **_EXPERTS,
        },
    ),
}
