"""EAGLE-3 in the layout of speculators, for other engines. ``outpace.learned.published`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.learned.folder import write_folder
from outpace.learned.published import NORMS


def write(
    folder: str | Path,
    fields: Mapping[str, Any],
    layer: Mapping[str, Any],
    target: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Write a folder in speculators' layout.

    Args:
        folder: the folder, created if needed.
        fields: the EagleConfig's.
        layer: the config of its layers, under the names of a LlamaConfig.
        target: ``name_or_path`` and ``architectures`` of the target.
        tensors: by speculators' names.
    """
    rope = dict(layer["rope_parameters"])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    greedy = {"proposal_type": "greedy", "speculative_tokens": fields["steps"]}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": fields["draft_vocabulary"],
        **{name: fields[name] for name in NORMS},
        "eagle_aux_hidden_state_layer_ids": list(fields["layers"]),
        "transformer_layer_config": {
            "model_type": "llama",
            **layer,
            # The entry of transformers 5, and the two of earlier versions.
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
            "num_hidden_layers": fields["depth"],
            "vocab_size": len(tensors["t2d"]),
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": dict(target),
        },
    }
    write_folder(folder, config, tensors)
