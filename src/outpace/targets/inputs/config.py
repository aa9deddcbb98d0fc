"""Values read from a model and its config."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outpace.core import UnsupportedModel

GPU = "cuda"
# Under these the longest position in a forward decides the rope of all its rows, past the original length.
_ROPE_BY_LENGTH = ("dynamic", "longrope")
# The argument for a cache in this version of transformers: "cache" since 5.24, "past_key_values" before.
_MOST_ENDS = 1024  # tokens that end a text: models have a few
CACHE = "cache" if "cache" in inspect.signature(GenerateDecoderOnlyOutput).parameters else "past_key_values"


def family(model: Any) -> str:
    """Name of a model in errors."""
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', None) or 'no model_type'})"


def cache_argument(model: Any) -> str:
    """Name of the argument for a cache in a model's forward; remote code may have the former one."""
    return CACHE if CACHE in inspect.signature(model.forward).parameters else "past_key_values"


def config_of(part: Any, model: Any) -> Any:
    """The config of a part of a model: its own, if it has one."""
    return getattr(part, "config", model.config)


def is_multimodal(config: Any) -> bool:
    """True if a model's config contains that of a language model, whose prompts it may fill with images."""
    return hasattr(config, "get_text_config") and config.get_text_config(decoder=True) is not config


def several_states(model: Any) -> bool:
    """True if a row has several states between two layers of a model, as by Gemma 3n's AltUp."""
    return (getattr(model.config.get_text_config(decoder=True), "altup_num_inputs", None) or 1) > 1


def runs_on_gpu(model: Any) -> bool:
    """True if all of a model is on GPUs."""
    return {weight.device.type for weight in model.parameters()} == {GPU}


def size_in(config: Any, name: str, model: Any) -> int:
    """A size that a model's config must have.

    Raises:
        UnsupportedModel: it has none.
    """
    size = getattr(config, name, None)
    if not isinstance(size, int):
        raise UnsupportedModel(f"{family(model)} has no {name} in its config, but {size!r}")
    return size


def context_of(config: Any) -> int | None:
    """A model's maximum number of positions, limited to those at which rows do not depend on the length."""
    context: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if any(kind.get("rope_type") in _ROPE_BY_LENGTH for kind in kinds):
        originals = [kind.get("original_max_position_embeddings") for kind in kinds]
        originals.append(getattr(config, "original_max_position_embeddings", None))
        known = [length for length in [context, *originals] if length]
        return min(known, default=None)
    return context


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a sequence: those of the generation config, otherwise of the config.

    Raises:
        UnsupportedModel: they are no token ids, or more than a model has.
    """
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if eos is None:
        return frozenset()
    found = eos if isinstance(eos, list | tuple) else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
        raise UnsupportedModel(
            f"{family(model)} has an eos_token_id that is no token id, {str(eos)[:60]}: correct its config"
        )
    if len(found) > _MOST_ENDS:
        raise UnsupportedModel(
            f"{family(model)} has {len(found)} end tokens in its config, and at most {_MOST_ENDS} are read; "
            "correct it"
        )
    return frozenset(found)


def takes_no_tree(config: Any) -> bool:
    """True if a model runs on kernels without masks, which ``tree_attention`` replaces."""
    return str(config._attn_implementation).startswith(("flash_attention_", "flex_attention"))
