"""What a GGUF file says of its model beside what transformers' mapping reads: taken over, or refused.

transformers leaves such values out silently, and its config then has a default, which may be another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
# What transformers' newer way to read a config reads (Qwen 3.5), beside its mapping of names.
_READ = frozenset({
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.dimension_sections",
    "full_attention_interval", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank",
    "ssm.inner_size", "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
})  # fmt: skip


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
    read = _READ if config.model_type.startswith("qwen3_5") else frozenset[str]()
    left = {name: value for name, value in values.items() if mapped.get(name) is None and name not in read}
    for name in sorted(left):  # the size of a head before how much of it is rotated
        if name in _HARMLESS:
            continue
        take = _KNOWN.get(name)
        if take is None or not take(config, left[name]):
            value = str(left[name])[:40]
            raise UnsupportedModel(f"its {name} is {value}, which transformers' config leaves out")


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


def _base(config: Any, value: Any) -> bool:
    rotation = getattr(config, "rope_parameters", None)
    if not isinstance(rotation, dict) or "rope_theta" not in rotation:
        return False
    rotation["rope_theta"] = float(value)
    return True


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
    "rope.scaling.type": lambda config, value: value == "none",
    "rope.scaling.factor": lambda config, value: float(value) in (0.0, 1.0),
    "rope.scale_linear": lambda config, value: float(value) in (0.0, 1.0),
    "ssm.dt_b_c_rms": lambda config, value: not value,
    "expert_count": lambda config, value: value == getattr(config, "num_local_experts", 0),
    "expert_used_count": lambda config, value: value == getattr(config, "num_experts_per_tok", 0),
    "expert_feed_forward_length": _attribute("moe_intermediate_size"),
    "expert_shared_feed_forward_length": _attribute("shared_expert_intermediate_size"),
}
