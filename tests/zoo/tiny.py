"""A small random model of any causal family, from the names in its config alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from zoo.family import VOCABULARY, WINDOW, randomise

# Names of sizes in configs, and the size of a small model; the first that matches. None leaves it out.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"vocab_size|ngram_vocab_size_base", VOCABULARY),
    (r"(bos|eos|pad|sep|cls|mask|unk)_token_id", None),
    (r"(is_decoder|use_cache)", True),
    (r"(tie_word_embeddings|tie_.*embeddings|use_mamba_kernels)", False),
    (r"hidden_size|d_model|n_embd|embedding_size|word_embed_proj_dim|dim_model|emb_dim|embed_dim", 32),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|dim_ff|d_ff|n_inner).*", 48),
    (r"moe_.*intermediate.*|moe_ffn_hidden_size|shared_expert.*size|expert_.*size|.*expert_dim", 16),
    (r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers", 2),
    (r".*(key_value_heads|kv_heads|num_query_groups).*", 2),
    (r"(num_|n_)?.*(attention_heads|heads|n_head)", 4),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|.*head_dim|attention_head_size|d_kv|kv_channels", 8),
    (r"n_positions|max_position_embeddings|max_seq_len.*|seq_length|n_ctx|.*max_length", 256),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"(num|n)_shared_experts", 1),
    (r".*(experts_per_tok(en)?|moe_topk?|top_?k|moe_k)", 2),
    (r"n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r".*lora_rank|.*low_?rank.*", 16),
    (r"sliding_window", WINDOW),
    (r"rotary_dim|rotary_ndims", 8),
    (r"type_vocab_size", 2),
)  # fmt: skip


def tiny_config(kind: str, options: Mapping[str, Any]) -> PretrainedConfig:
    """A config of a type as small as its names allow.

    Args:
        options: entries that replace those found by name.
    """
    made: Any = CONFIG_MAPPING[kind]
    default = made()
    given: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if isinstance(value, list) and re.fullmatch(r"(mlp_)?layer_types", name):
            kinds = list(dict.fromkeys(value))
            given[name] = (kinds * 2)[: max(2, len(kinds))]
        elif isinstance(value, bool | int | float | None):
            for pattern, size in _SIZES:
                if re.fullmatch(pattern, name):
                    if size is None or value is not None:
                        given[name] = size
                    break
    counts = [len(value) for name, value in given.items() if isinstance(value, list)]
    if counts:
        given["num_hidden_layers"] = max(counts)
        for name, value in given.items():
            if isinstance(value, list):
                given[name] = (value * max(counts))[: max(counts)]
    given = {**given, **options}
    return made(**{name: value for name, value in given.items() if value != "default"})


def tiny_model(kind: str, options: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model of a type with random weights in float32, the same in every run, as transformers makes it."""
    config = tiny_config(kind, options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(model, seed)
    return model
