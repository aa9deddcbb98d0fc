"""Memory that a model needs, computed from its configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from outpace.targets.weights.groups import layout_of

GIB = 2**30


@dataclass(frozen=True)
class Needs:
    """Memory needed to decode with a model.

    Attributes:
        parameters: number of parameters, tied ones counted once.
        weights: bytes of the parameters.
        row: bytes of the keys and values of one token, if all layers keep full rows.
        dtype: dtype of both.
    """

    parameters: int
    weights: int
    row: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.parameters / 1e9:.1f} billion parameters take {self.weights / GIB:.1f} GiB in {kind}, "
            f"each token of a text {self.row / 2**20:.2f} MiB ({4096 * self.row / GIB:.2f} GiB for 4096)"
        )


def needs_of(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> Needs:
    """Memory of a decoder-only transformers model in a dtype, from a model on the device "meta".

    Layers that are rounded in the checkpoint are counted as a CPU holds them.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    parameters = sum(weight.numel() for weight in model.parameters())
    bits, head = bits_held(config), model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    rounded = sum(layer.weight.numel() for layer in layers) if bits else 0
    weights = (parameters - rounded) * dtype.itemsize + math.ceil(rounded * bits / 8)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    row = 2 * text.num_hidden_layers * heads * size * dtype.itemsize
    return Needs(parameters, weights, row, dtype)


def is_large(config: Any) -> bool:
    """True for a model of about a billion parameters or more, whose memory is reported."""
    text = config.get_text_config(decoder=True)
    return int(12 * text.num_hidden_layers * text.hidden_size**2) >= 10**9


def bits_held(config: Any) -> float:
    """Bits that a rounded weight takes, its share of a block's scale and zero included; 0 for floats."""
    layout = layout_of(getattr(config, "quantization_config", None))
    return 0.0 if layout is None else {4: 5.0, 8: 8.5}.get(layout.bits, 0.0)
