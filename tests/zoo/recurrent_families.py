"""Model families with recurrent layers; see ``families.py``."""

from __future__ import annotations

from typing import Any

from zoo.family import WINDOW, Family

_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_SHORT = ["conv", "conv", "full_attention", "conv"]
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": _LAYERS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA: dict[str, Any] = {"num_hidden_layers": 3, "state_size": 8, "expand": 2, "conv_kernel": 4}
_MAMBA2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

RECURRENT: dict[str, Family] = {
    "qwen3-next": Family("Qwen3NextConfig", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3.5": Family("Qwen3_5TextConfig", _DELTA),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeTextConfig", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "olmo-hybrid": Family("OlmoHybridConfig", {**_DELTA, "linear_num_key_heads": 4}),
    "lara-mini": Family("LaraMiniConfig", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "kimi-linear": Family(
        "KimiLinearConfig",
        {
            **_LATENT,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "bailing-hybrid": Family(
        "BailingHybridConfig",
        {
            **_LATENT,
            **_EXPERTS,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_expert_group": 1,
            "topk_group": 1,
        },
    ),
    "mamba2": Family(
        "Mamba2Config",
        {
            "num_hidden_layers": 3,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 2,
            "expand": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
        },
        sdpa=False,
    ),
    "bamba": Family("BambaConfig", {**_MAMBA2, "attn_layer_indices": [2]}),
    "granite-hybrid": Family(
        "GraniteMoeHybridConfig",
        {**_MAMBA2, "layer_types": _LAYERS, "shared_intermediate_size": 32, "num_local_experts": 0},
    ),
    "falcon-h1": Family("FalconH1Config", {**_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "nemotron-h": Family(
        "NemotronHConfig",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "zamba2": Family(
        "Zamba2Config",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"],
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_expand": 2,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "adapter_rank": 8,
        },
    ),
    "mamba": Family("MambaConfig", _MAMBA, sdpa=False),
    "falcon-mamba": Family("FalconMambaConfig", _MAMBA, sdpa=False),
    "jamba": Family(
        "JambaConfig",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "zamba": Family(
        "ZambaConfig",
        {
            "num_hidden_layers": 6,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
    "lfm2": Family("Lfm2Config", {"num_hidden_layers": 4, "layer_types": _SHORT, "block_ff_dim": 48}),
    "lfm2-moe": Family(
        "Lfm2MoeConfig",
        {"num_hidden_layers": 4, "layer_types": _SHORT, **_EXPERTS, "num_dense_layers": 1},
    ),
    "lfm3": Family(
        "Lfm3Config",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "sliding_window": WINDOW,
            **_EXPERTS,
        },
    ),
}
# One for each kind of recurrence, with attention beside it, and one without any.
KINDS = ("qwen3-next", "kimi-linear", "bamba", "jamba", "lfm2", "mamba2")

# Families that keep a state, and are refused: words of the reason.
_UNKNOWN = "by functions that outpace does not know"
REFUSED: dict[str, tuple[Family, str]] = {
    "qwen4_exp": (
        Family(
            "Qwen4ExpTextConfig",
            {
                **_DELTA,
                **_EXPERTS,
                "shared_expert_intermediate_size": 16,
                "hc_count": 2,
                "hc_lowrank": 8,
                "ple_embed_dim": 16,
                "ngram_vocab_size_base": 64,
                "make_ngram_vocab_size_divisible_by": 8,
                "heads_per_ngram": 2,
                "split_ngram_parts": 2,
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 8,
                "indexer_budget": 16,
                "indexer_compress_ratio": 4,
            },
        ),
        "more than keys and values by position.*DynamicIndexedLayer",
    ),
    "inkling": (
        Family(
            "InklingTextConfig",
            {
                "num_hidden_layers": 4,
                "head_dim": 8,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
                "swa_head_dim": 8,
                "sliding_window_size": WINDOW,
                "d_rel": 4,
                "rel_extent": 32,
                "moe_intermediate_size": 16,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
            },
            sdpa=False,
        ),
        "limits its attention by sliding_window_size",
    ),
    "zaya": (Family("ZayaConfig", {"num_hidden_layers": 1, "head_dim": 8}), _UNKNOWN),
    "recurrent_gemma": (
        Family("RecurrentGemmaConfig", {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}),
        "limits its attention by attention_window_size",
    ),
    "rwkv": (Family("RwkvConfig", {"attention_hidden_size": 32}), _UNKNOWN),
    "xlstm": (Family("xLSTMConfig", {"num_blocks": 2, "num_heads": 4}), _UNKNOWN),
    "minimax": (
        Family(
            "MiniMaxConfig",
            {"num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 2, "block_size": 8},
        ),
        _UNKNOWN,
    ),
    "deepseek_v4": (Family("DeepseekV4Config", {"num_hidden_layers": 1}), _UNKNOWN),
}
# Families with a state that read images or sound too: their language models are the families above, or they
# have no class for text alone.
MULTIMODAL = {
    "glm5_next",
    "minicpm_ocr",
    "minicpmv4_6",
    "minicpmv4_7",
    "nemotron3_5_transcribe",
    "nemotron_h_omni",
}
# Loops of Inkling, which have no class for text generation.
WITHOUT_HEAD = {"inkling2", "inkling2_loop"}
