"""What a GGUF file says of its model beside what transformers' mapping reads: taken over, or refused.

transformers leaves such values out silently, and its config then has a default, which may be another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import AutoConfig

from outpace.core import UnsupportedModel

# Values that no forward depends on, or that say again what the tensors' shapes say.
_HARMLESS = frozenset({
    "vocab_size", "tensor_data_layout", "block_count", "context_length", "embedding_length",
    "feed_forward_length", "use_parallel_residual", "attention.causal", "attention.sliding_window_pattern",
    "nextn_predict_layers",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
})  # fmt: skip
# What is read beside transformers' mapping of names: by its newer way to read a config, and by ``gemma4``.
_ANYWAY = frozenset({
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
})  # fmt: skip
_DELTA = _ANYWAY | {
    "rope.dimension_sections", "full_attention_interval", "ssm.conv_kernel", "ssm.state_size",
    "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size", "expert_count", "expert_used_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length",
}  # fmt: skip
_READ = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "gemma4_text": _ANYWAY | {
        "attention.sliding_window", "attention.shared_kv_layers", "attention.key_length_swa",
        "attention.value_length", "attention.value_length_swa", "embedding_length_per_layer_input",
        "rope.dimension_count_swa", "rope.freq_base_swa", "final_logit_softcapping",
    },
}  # fmt: skip


# The layers of a family's models whose queries llama.cpp scales by another size than that of a head.
_WIDE_QUERIES = {"gemma2": 46, "gemma3_text": 62}


def gemma4(values: Mapping[str, Any], rows: Mapping[str, int]) -> Any:
    """Gemma 4's config, of which transformers' mapping leaves out what differs between layers.

    Args:
        rows: of the file's tensors, by their names.
    """
    if values.get("expert_count"):
        raise UnsupportedModel("experts of Gemma 4 are not read")
    for end in ("", "_swa"):
        size = values[f"attention.key_length{end}"]
        if {values[f"attention.value_length{end}"], values[f"rope.dimension_count{end}"]} != {size}:
            raise UnsupportedModel("its keys, values and rotations have different sizes")
    windows = values["attention.sliding_window_pattern"]
    whole, inputs = windows.index(False), values.get("embedding_length_per_layer_input", 0)
    heads, inner = (
        value if isinstance(value, list) else [value] * len(windows)
        for value in (values["attention.head_count_kv"], values["feed_forward_length"])
    )
    return AutoConfig.for_model(
        "gemma4_text",
        vocab_size_per_layer_input=rows.get("per_layer_token_embd.weight", 0),
        hidden_size=values["embedding_length"],
        hidden_size_per_layer_input=inputs,
        intermediate_size=inner[0],
        use_double_wide_mlp=inner[-1] != inner[0],
        num_hidden_layers=len(windows),
        layer_types=["sliding_attention" if window else "full_attention" for window in windows],
        sliding_window=values["attention.sliding_window"],
        num_attention_heads=values["attention.head_count"],
        num_key_value_heads=heads[windows.index(True)],
        num_global_key_value_heads=heads[whole],
        attention_k_eq_v=f"blk.{whole}.attn_v.weight" not in rows,
        num_kv_shared_layers=values.get("attention.shared_kv_layers", 0),
        head_dim=values["attention.key_length_swa"],
        global_head_dim=values["attention.key_length"],
        rms_norm_eps=values["attention.layer_norm_rms_epsilon"],
        max_position_embeddings=values["context_length"],
        final_logit_softcapping=values.get("final_logit_softcapping"),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": values["rope.freq_base_swa"]},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": values["rope.freq_base"],
            },
        },
    )


def mixture(config: Any, values: Mapping[str, Any]) -> Any:
    """The config of a mixture in a file of llama, whose experts transformers' mapping leaves out."""
    experts = values.get("expert_count", 0)
    if config.model_type != "llama" or not experts:
        return config
    left = ("model_type", "architectures", "transformers_version")
    known = {name: value for name, value in config.to_dict().items() if name not in left}
    used = values.get("expert_used_count", 2)
    return AutoConfig.for_model("mixtral", **known, num_local_experts=experts, num_experts_per_tok=used)


def settle(config: Any, values: Mapping[str, Any], mapped: Mapping[str, str | None]) -> None:
    """Take over the values that transformers' mapping leaves out.

    Args:
        config: transformers', which is changed.
        values: of the family, by names without its own.
        mapped: names -> attributes of the config; None for those that the mapping leaves out.

    Raises:
        UnsupportedModel: a value is not known, or asks for another model than the config describes.
    """
    read = _READ.get(config.model_type, frozenset[str]())
    left = {name: value for name, value in values.items() if mapped.get(name) is None and name not in read}
    for name in sorted(left):  # the size of a head before how much of it is rotated
        if name in _HARMLESS:
            continue
        take = _KNOWN.get(name)
        if take is None or not take(config, left[name]):
            value = str(left[name])[:40]
            raise UnsupportedModel(f"its {name} is {value}, which transformers' config leaves out")
    if (layers := _WIDE_QUERIES.get(config.model_type)) is not None:  # no file says it
        wide = config.num_hidden_layers == layers
        config.query_pre_attn_scalar = (
            config.hidden_size // config.num_attention_heads if wide else head_of(config)
        )


def head_of(config: Any) -> int:
    """Numbers of a head."""
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _head(config: Any, value: Any) -> bool:
    if head_of(config) == int(value):
        return True
    if getattr(config, "head_dim", None) is None:
        return False
    config.head_dim = int(value)
    return True


def _attribute(*names: str) -> Callable[[Any, Any], bool]:
    """Set the first of these attributes that a config has."""

    def take(config: Any, value: Any) -> bool:
        name = next((name for name in names if hasattr(config, name)), None)
        if name is not None:
            setattr(config, name, value)
        return name is not None

    return take


def _rotated(config: Any, value: Any) -> bool:
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    share = share or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(head_of(config) * share) == int(value)


def _rotation(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    """The parameters of all layers' rotation, or of a kind of layers'; empty if there are none."""
    found = getattr(config, "rope_parameters", None) or {}
    own: dict[str, Any] = found.get(layers, found if layers == "full_attention" else {})
    return own


def _base(config: Any, value: Any, layers: str = "full_attention") -> bool:
    rotation = _rotation(config, layers)
    if "rope_theta" not in rotation:
        return False
    rotation["rope_theta"] = float(value)
    return True


def _slower(config: Any, value: Any) -> bool:
    """Take over by what positions are divided: linear scaling, if the file names no other."""
    rotation = _rotation(config)
    if float(value) in (0.0, 1.0):
        return True
    if rotation.get("rope_type") != "default":
        return False
    rotation |= {"rope_type": "linear", "factor": float(value)}
    return True


def _scaling(config: Any, value: Any) -> bool:
    rotation = _rotation(config)
    if value == "none" and rotation.get("rope_type") == "linear":
        rotation["rope_type"] = "default"
    return value == "none" or (value == "linear" and rotation.get("rope_type") == "linear")


def _recurrent(config: Any, value: Any) -> bool:
    own = [kind == "linear_attention" for kind in config.layer_types]
    return own == list(value)[: len(own)]


def _window(config: Any, value: Any) -> bool:
    return not value or _attribute("sliding_window")(config, int(value))


_KNOWN: Mapping[str, Callable[[Any, Any], bool]] = {
    "attention.key_length": _head,
    "attention.value_length": _head,
    "attention.head_count": lambda config, value: not value,
    "attention.head_count_kv": lambda config, value: not value or value == config.num_attention_heads,
    "attention.layer_norm_epsilon": _attribute("norm_eps", "layer_norm_epsilon"),
    "attn_logit_softcapping": _attribute("attn_logit_softcapping"),
    "final_logit_softcapping": _attribute("final_logit_softcapping"),
    "attention.sliding_window": _window,
    "rope.dimension_count": _rotated,
    "rope.freq_base": _base,
    "rope.freq_base_swa": partial(_base, layers="sliding_attention"),
    "rope.scaling.factor": _slower,  # before the type, as its name is
    "rope.scaling.type": _scaling,
    "attention.recurrent_layers": _recurrent,
    "rope.scale_linear": lambda config, value: float(value) in (0.0, 1.0),
    "ssm.dt_b_c_rms": lambda config, value: not value,
    "expert_count": lambda config, value: value == getattr(config, "num_local_experts", 0),
    "expert_used_count": lambda config, value: value == getattr(config, "num_experts_per_tok", 0),
    "expert_feed_forward_length": _attribute("moe_intermediate_size"),
    "expert_shared_feed_forward_length": _attribute("shared_expert_intermediate_size"),
}
