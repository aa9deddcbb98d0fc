"""A small random model of any family, from the names in its config alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from zoo.family import VOCABULARY, WINDOW, randomise

# Names of sizes in configs, and the size of a small model; the first that matches. None leaves a token out.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"type_vocab_size|num_channels|in_channels", "default"),
    (r"(.*_)?vocab_size|ngram_vocab_size_base", VOCABULARY),
    (r"(bos|eos|sep|cls|unk)_token_id", None),
    (r"pad_token_id", 0),
    (r"(image|video|audio|vision|boi|eoi|boa|eoa).*token_(id|index)", VOCABULARY - 2),
    (r"is_decoder", True),
    (r"tie_.*embeddings|use_mamba_kernels", False),
    (r"moe_.*intermediate.*|moe_ffn_hidden_size|shared_expert.*size|expert_.*size|.*expert_dim", 16),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|dim_ff|d_ff|n_inner|mlp_dim).*", 48),
    (r"(.*_)?hidden_size|d_model|n_embd|embedding_size|word_embed_proj_dim|dim_model|emb_dim|embed_dim", 32),
    (r"num_hidden_layers|n_layers?|num_layers|(num_)?decoder_layers|(num_)?encoder_layers|depth", 2),
    (r".*(key_value_heads|kv_heads|num_query_groups).*", 2),
    (r"(num_|n_)?.*(attention_heads|heads|n_head)", 4),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|.*head_dim|attention_head_size|d_kv|kv_channels", 8),
    (r"n_positions|max_.*position.*|max_seq_len.*|seq_length|n_ctx|.*max_length", 256),
    (r"image_size", 16),
    (r"patch_size", 4),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"(num|n)_shared_experts", 1),
    (r".*(experts_per_tok(en)?|moe_topk?|top_?k|moe_k)", 2),
    (r"n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r".*lora_rank|.*low_?rank.*", 16),
    (r"sliding_window", WINDOW),
    (r"rotary_dim|rotary_ndims", 8),
)  # fmt: skip


def tiny_config(kind: str, options: Mapping[str, Any]) -> PretrainedConfig:
    """A config of a type as small as its names allow.

    Args:
        options: entries that replace those found by name; "default" takes the type's own. With "only", no
            others are given. "instead" has parts that its class does not allow.
    """
    made: Any = CONFIG_MAPPING[kind]
    config: PretrainedConfig = made(**_entries(made(), options))
    for name, part in options.get("instead", {}).items():
        vars(config)[name] = CONFIG_MAPPING[part["model_type"]](**part)
    return config


def _entries(default: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a small config like this one."""
    if "only" in options:
        return dict(options["only"])
    given: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            given[name] = {
                **({"model_type": part.model_type} if part.model_type else {}),
                **_entries(part, options.get(name, {})),
            }
        elif isinstance(value, list) and re.fullmatch(r"(mlp_)?layer_types", name):
            given[name] = list(dict.fromkeys(value))
        elif isinstance(value, bool | int | float | None):
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), "default")
            if size is None or (value is not None and size != "default"):
                given[name] = size
    if "qk_rope_head_dim" in given:  # latent attention, which has no other sizes of heads
        given = {name: size for name, size in given.items() if name not in ("head_dim", "qk_head_dim")}
        given["num_key_value_heads"] = given.get("num_attention_heads", 4)
    kinds = {name: value for name, value in given.items() if isinstance(value, list)}
    if kinds:
        count = (
            max(2, *map(len, kinds.values())) if len(kinds) > 1 else max(2, len(next(iter(kinds.values()))))
        )
        given |= {name: (value * count)[:count] for name, value in kinds.items()}
        given["num_hidden_layers"] = count
    given |= {name: value for name, value in options.items() if not isinstance(given.get(name), dict)}
    return {name: value for name, value in given.items() if value != "default" and name != "instead"}


def tiny_model(
    kind: str, options: Mapping[str, Any], seed: int = 0, auto: str = "AutoModelForCausalLM"
) -> PreTrainedModel:
    """A model of a type with random weights in float32, the same in every run, as transformers makes it.

    Args:
        auto: transformers' class that knows the type.
    """
    config = tiny_config(kind, options)
    model: PreTrainedModel = getattr(transformers, auto).from_config(config).eval()
    randomise(model, seed)
    return model
