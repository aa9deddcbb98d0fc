"""Model families as data: a small random configuration of each, and how to build the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 96
WINDOW = 8  # of sliding attention: well below the prompts' length

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Family:
    """A family and a configuration of it.

    Attributes:
        config: name of its config class in transformers.
        options: of the config, beside the common ones.
        sdpa: whether it has sdpa attention; eager it has always.
        sliding: whether some of its layers see a window only.
        common: whether its config takes the usual names.
        seed: of the weights; 0 unless that model loops.
    """

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    sdpa: bool = True
    sliding: bool = False
    common: bool = True
    seed: int = 0

    def load(self) -> PreTrainedModel:
        """A model as transformers makes it: its own choice of attention and experts, in float32."""
        model = transformers.AutoModelForCausalLM.from_config(self._config()).eval()
        randomise(model, self.seed)
        return model

    def _config(self) -> PretrainedConfig:
        options = {**(_COMMON if self.common else {}), **self.options}
        config: PretrainedConfig = getattr(transformers, self.config)(**options)
        return config

    def build(self, dtype: torch.dtype = torch.float64, attention: str | None = None) -> PreTrainedModel:
        """A model with random weights, the same in every run."""
        config = self._config()
        config._attn_implementation = attention or ("sdpa" if self.sdpa else "eager")
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        if hasattr(model, "set_experts_implementation") and _has_experts(config):
            model.set_experts_implementation("batched_mm")  # the default has no float64 kernel
        randomise(model, self.seed)
        return model


def _has_experts(config: Any) -> bool:
    return any(hasattr(config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that greedy output neither loops nor comes near a tie."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            if parameter in embeddings:
                parameter.copy_(noise)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 1.7 * parameter.shape[-1] ** -0.5)
            elif "norm" in name or "ln_" in name:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * 0.3)


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig"),
    "mistral": Family("MistralConfig", {"sliding_window": WINDOW, "head_dim": 8}, sliding=True),
    "qwen2": Family("Qwen2Config"),
    "qwen2-sliding": Family(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        sliding=True,
    ),
    "qwen3": Family("Qwen3Config", {"head_dim": 16}),
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
    "phi3": Family("Phi3Config", {"sliding_window": WINDOW}, sliding=True),
    "gpt2": Family(
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        common=False,
    ),
    "gpt-neox": Family("GPTNeoXConfig", seed=2),
    "opt": Family("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "starcoder2": Family("Starcoder2Config", {"sliding_window": WINDOW}, sliding=True, seed=3),
    "stablelm": Family("StableLmConfig", seed=1),
    "olmo2": Family("Olmo2Config"),
    "granite": Family(
        "GraniteConfig",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
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

_OLD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

# Families that take chains only: their positions or masks cannot be set.
CHAINS: dict[str, Family] = {
    "bloom": Family("BloomConfig", {**_OLD, "n_layer": 2, "n_head": 4}, sdpa=False, common=False),
    "mpt": Family(
        "MptConfig",
        {**_OLD, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
        sdpa=False,
        common=False,
    ),
    "falcon-alibi": Family(
        "FalconConfig",
        {**_OLD, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        common=False,
    ),
    "gpt-neo": Family(
        "GPTNeoConfig",
        {
            **_OLD,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": 256,
        },
        sdpa=False,
        common=False,
    ),
    "llama4": Family(
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "bart-decoder": Family(
        "BartConfig",
        {
            **{name: value for name, value in _OLD.items() if name != "hidden_size"},
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "pad_token_id": 0,
            "forced_eos_token_id": None,
        },
        common=False,
    ),
}

# A family and the attention it runs on: (name, implementation).
RUNS = [
    (name, attention)
    for name, family in FAMILIES.items()
    for attention in (["sdpa", "eager"] if family.sdpa else ["eager"])
]
