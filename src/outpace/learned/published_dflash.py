"""Published DFlash drafters and their kin, in the formats of z-lab, speculators, transformers and others.

All are a config.json and safetensors with the same names as here: ``layers``, ``fc``, ``hidden_norm`` and
``norm``; in transformers' format (Muse's assistant) the second and third are ``encoder.fc`` and
``encoder.output_norm_enc``. The mask is a token of the target's vocabulary. z-lab and transformers count the
target's layers that are read from the first one's output on, speculators from its input on. speculators'
files also have copies of the target's embeddings, head and norm. DSpark, DFlash 2 and JetSpec add entries and
tensors to one of these formats: ``read_extension`` reads them. DSpark's confidence head is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.learned.formats import given_by, is_dspark
from outpace.learned.published import all_tensors, check_attention, config_of, layer_of, sizes_of, target_of

# The target's, which speculators' files repeat.
COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_MAPS = ("t2d", "d2t")
_TRANSFORMERS = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
_CONFIDENCE = "confidence_head."
# Options under which the drafter computes something that is not computed here, with the values under which it
# does not.
_NEUTRAL = {
    "projector_type": (None, "dflash", "dspark"),
    "shift_label": (None, False),
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "is_neox_style": (None, True),
}
# Entry -> the field of an ExtendedConfig, and its value under which nothing is added.
_FURTHER: Mapping[str, tuple[str, float]] = {
    "markov_rank": ("markov_rank", 0),
    "conv_kernel_size": ("taps", 0),
    "conv_group_size": ("group", 1),
    "selector_rank": ("selector_rank", 0),
    "selector_top_k": ("candidates", 1),
    "input_embedding_scale": ("input_scale", 1.0),
    "output_multiplier": ("multiplier", 1.0),
    "final_logit_softcapping": ("cap", 0.0),
}
_MARKOV_KINDS = ("vanilla", "gated", "rnn")
_SLIDING = "sliding_attention"
Number = TypeVar("Number", int, float)


def read(folder: str | Path) -> dict[str, Any] | None:
    """The config.json of a published DFlash drafter, in either layout; None for anything else."""
    config = config_of(folder)
    if "method" in config:
        return None
    return config if {"speculators_model_type", "dflash_config", "block_size"} & config.keys() else None


def read_config(
    config: Mapping[str, Any], layers: int, vocabulary: int, folder: str | Path
) -> dict[str, Any]:
    """The fields of a DFlashConfig, and ``vocabulary``, ``mask_token`` and ``target``.

    Args:
        layers: number of the target's layers.
        vocabulary: the target's, which transformers' format does not name.

    Raises:
        OutpaceError: it is of another method, has unknown parts, or lacks what is needed.
    """
    speculators = "speculators_model_type" in config
    given = given_by(config)
    for name, neutral in _NEUTRAL.items():
        if given.get(name) not in neutral:
            raise OutpaceError(
                f"dflash: {folder} has {name}={given[name]!r}, which is not supported; train a drafter of "
                "your own: outpace train dflash"
            )
    inner = layer_of(config.get("transformer_layer_config", config), folder, "dflash")
    depth = inner.num_hidden_layers
    check_attention(inner, depth, folder, "dflash", ("full_attention", _SLIDING))
    own = getattr(inner, "vocab_size", vocabulary)
    drafted = config.get("draft_vocab_size") or own
    if drafted > own:
        raise OutpaceError(
            f"dflash: the drafter in {folder} drafts {drafted} of {own} tokens; that cannot be"
        )
    key = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    missing = [name for name in ("block_size", "mask_token_id", key) if given.get(name) is None]
    if missing:
        raise OutpaceError(f"dflash: config.json in {folder} lacks {', '.join(missing)}")
    # z-lab's last layer is transformers' last hidden state, which is normalised.
    read_layers = [int(one) if speculators else int(one) + 1 for one in given[key]]
    return {
        **sizes_of(inner),
        "tokens": _number(given, "block_size", int, folder) - (not _anchored(config)),
        "depth": depth,
        "layers": tuple(-1 if one == layers and not speculators else one for one in read_layers),
        "vocabulary": own,
        "draft_vocabulary": drafted % own,
        "mask_token": _number(given, "mask_token_id", int, folder),
        "target": target_of(config),
    }


def _anchored(config: Mapping[str, Any]) -> bool:
    """True if a block's first place is predicted at the root's own row."""
    return bool(given_by(config).get("sample_from_anchor", is_dspark(config)))


def read_extension(config: Mapping[str, Any], depth: int, folder: str | Path) -> dict[str, Any]:
    """The fields of an ExtendedConfig that differ from those of a DFlash by itself.

    Raises:
        OutpaceError: a part is of an unknown kind, or its size is no number.
    """
    given, inner = (
        given_by(config),
        layer_of(config.get("transformer_layer_config", config), folder, "dflash"),
    )
    found: dict[str, Any] = {}
    for name, (own, neutral) in _FURTHER.items():
        if given.get(name) is not None and (value := _number(given, name, type(neutral), folder)) != neutral:
            found[own] = value
    if _anchored(config):
        found["anchored"] = True
    if "markov_rank" in found:
        found["markov_kind"] = kind = str(given.get("markov_head_type") or "vanilla").lower()
        if kind not in _MARKOV_KINDS:
            raise OutpaceError(
                f"dflash: {folder} has markov_head_type={kind!r}; known are {', '.join(_MARKOV_KINDS)}"
            )
    slides = [kind == _SLIDING for kind in (getattr(inner, "layer_types", None) or [""] * depth)[:depth]]
    # In speculators' layout layers with a window are causal, unless it says otherwise.
    causal = "speculators_model_type" in config and not config.get("sliding_window_non_causal")
    told = [given[name] for name in ("is_causal", "causal", "causal_head") if given.get(name) is not None]
    rows = [bool(told[0])] * depth if told else [causal and slid for slid in slides]
    if any(slides):
        found["windows"] = tuple(inner.sliding_window if slid else 0 for slid in slides)
    if any(rows):
        found["causal"] = tuple(rows)
    return found


def _number(given: Mapping[str, Any], name: str, kind: type[Number], folder: str | Path) -> Number:
    """An entry that must be a number."""
    try:
        return kind(given[name])
    except (TypeError, ValueError):
        raise OutpaceError(
            f"dflash: {name} in the config.json of {folder} must be a number, not {given[name]!r}"
        ) from None


def read_tensors(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The drafter's tensors, and the copies of the target's.

    Raises:
        OutpaceError: there are no safetensors, they cannot be read, or the maps of ids contradict each other.
    """
    every = all_tensors(folder, "dflash")
    found = {name: one for name, one in every.items() if not name.startswith(_CONFIDENCE)}
    copies = {name: found.pop(name) for name in COPIES if name in found}
    kept = {name: one for name, one in found.items() if name not in _MAPS}
    if (offsets := found.get("d2t")) is not None and offsets.any():
        kept["drafted.ids"] = ids = torch.arange(len(offsets)) + offsets
        marked = found.get("t2d")
        if marked is not None and marked.nonzero().flatten().tolist() != ids.tolist():
            raise OutpaceError(
                f"dflash: tensor 't2d' in {folder} marks {int(marked.sum())} ids as drafted, instead of the "
                f"{len(ids)} that tensor 'd2t' maps to"
            )
    return {_TRANSFORMERS.get(name, name): one for name, one in kept.items()}, copies
