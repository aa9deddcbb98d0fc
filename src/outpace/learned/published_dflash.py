"""Published DFlash drafters: the formats of z-lab/dflash, of vllm-project/speculators and of transformers.

All are a config.json and safetensors with the same names as here: ``layers``, ``fc``, ``hidden_norm`` and
``norm``; in transformers' format (Muse's assistant) the second and third are ``encoder.fc`` and
``encoder.output_norm_enc``. The mask is a token of the target's vocabulary. z-lab and transformers count the
target's layers that are read from the first one's output on, speculators from its input on. speculators'
files also have copies of the target's embeddings, head and norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.learned.published import all_tensors, check_attention, config_of, layer_of, sizes_of, target_of

# The target's, which speculators' files repeat.
COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_MAPS = ("t2d", "d2t")
_TRANSFORMERS = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
# Options under which the drafter computes something else, with the values under which it does not.
_NEUTRAL = {
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "final_logit_softcapping": (None, 0, 0.0),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "projector_type": (None, "dflash"),
    "shift_label": (None, False),
    "sample_from_anchor": (None, False),
}


def read(folder: str | Path) -> dict[str, Any] | None:
    """The config.json of a published DFlash drafter, in either layout; None for anything else."""
    config = config_of(folder)
    if "method" in config:
        return None
    return config if {"speculators_model_type", "dflash_config", "block_size"} & config.keys() else None


def read_config(
    config: Mapping[str, Any], layers: int, vocabulary: int, folder: str | Path
) -> dict[str, Any]:
    """The fields of a DFlashConfig, and ``vocabulary``, ``mask_token``, ``windows`` and ``target``.

    ``windows`` has, for each layer, how far before it a row attends to, inclusively; 0 for no limit.

    Args:
        layers: number of the target's layers.
        vocabulary: the target's, which transformers' format does not name.

    Raises:
        OutpaceError: it is of another method, has unknown parts, or lacks what is needed.
    """
    speculators = "speculators_model_type" in config
    nested = config.get("dflash_config") or {}
    given = {**config, **nested}
    for name, neutral in _NEUTRAL.items():
        if given.get(name) not in neutral:
            raise OutpaceError(
                f"dflash: {folder} has {name}={given[name]!r}, which is not supported; train a drafter of "
                "your own: outpace train dflash"
            )
    inner = layer_of(config.get("transformer_layer_config", config), folder, "dflash")
    depth = inner.num_hidden_layers
    sliding = "sliding_attention"
    check_attention(inner, depth, folder, "dflash", ("full_attention", sliding))
    kinds = getattr(inner, "layer_types", None) or ["full_attention"] * depth
    if given.get("is_causal"):
        raise OutpaceError(f"dflash: {folder} has causal blocks; only bidirectional ones are supported")
    if speculators and sliding in kinds[:depth] and not config.get("sliding_window_non_causal"):
        raise OutpaceError(
            f"dflash: the layers with a window of the drafter in {folder} are causal in a block; only "
            "bidirectional ones are supported"
        )
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
        "tokens": int(given["block_size"]) - 1,
        "depth": depth,
        "layers": tuple(-1 if one == layers and not speculators else one for one in read_layers),
        "vocabulary": own,
        "draft_vocabulary": drafted % own,
        "windows": tuple(inner.sliding_window if kind == sliding else 0 for kind in kinds[:depth]),
        "mask_token": int(given["mask_token_id"]),
        "target": target_of(config),
    }


def read_tensors(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The drafter's tensors, and the copies of the target's.

    Raises:
        OutpaceError: there are no safetensors, they cannot be read, or the maps of ids contradict each other.
    """
    found = all_tensors(folder, "dflash")
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
