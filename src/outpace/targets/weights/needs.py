"""Memory that a model needs, computed from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

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
    """Memory of a decoder-only transformers model in a dtype, from a model on the device "meta"."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    parameters = sum(weight.numel() for weight in model.parameters())
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    row = 2 * text.num_hidden_layers * heads * size * dtype.itemsize
    return Needs(parameters, parameters * dtype.itemsize, row, dtype)


def is_large(config: Any) -> bool:
    """True for a model of about a billion parameters or more, whose memory is reported."""
    text = config.get_text_config(decoder=True)
    return int(12 * text.num_hidden_layers * text.hidden_size**2) >= 10**9
