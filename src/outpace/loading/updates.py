"""Low-rank updates in a folder written by peft, merged into the matrices of a GGUF file.

A matrix that is updated is kept in floats; all others stay as they are in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel
from outpace.targets.cpu.quants import TYPES, QuantEmbedding, QuantLinear, QuantPart
from outpace.targets.weights import adapters

_STEM = "base_model.model."  # before a module's name, in peft's files


@torch.inference_mode(False)
@torch.no_grad()
def merge(model: Any, folder: Path) -> Any:
    """Add the updates in a folder to a model from a GGUF file, in place, and return the model.

    Raises:
        OutpaceError: peft is missing, or the updates do not fit the model.
        UnsupportedModel: they are for embeddings.
    """
    dtype = model.dtype
    names = sorted(filter(None, {_module_of(model, tensor) for tensor in adapters.tensors_of(folder)}))
    head = model.get_output_embeddings()
    for name in names:
        own = model.get_submodule(name)
        if isinstance(own, QuantEmbedding) or (own is head and model.config.tie_word_embeddings):
            raise UnsupportedModel(f"{folder} updates embeddings, which stay as they are in a GGUF file")
        model.set_submodule(name, _in_floats(own))
    merged = adapters.merge(model, folder)
    for name in names:
        plain = merged.get_submodule(name)
        part = QuantPart.pack(_type(dtype), _bytes(plain.weight, dtype), plain.in_features)
        if plain.bias is not None:
            plain.bias = nn.Parameter(plain.bias.to(dtype), requires_grad=False)
        merged.set_submodule(name, QuantLinear(plain, part, dtype))
    return merged


def _module_of(model: Any, tensor: str) -> str:
    """The name of the module of a file that a tensor of an update is for; empty if there is none."""
    name = tensor.removeprefix(_STEM)
    modules = dict(model.named_modules())
    while name and not isinstance(modules.get(name), QuantLinear | QuantEmbedding):
        name = name.rpartition(".")[0]
    return name


def _in_floats(layer: QuantLinear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(layer.packed.unpack(), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().float(), requires_grad=False)
    return plain


def _type(dtype: torch.dtype) -> int:
    return TYPES["bf16" if dtype == torch.bfloat16 else "f32"]


def _bytes(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(dtype).contiguous().view(torch.uint8)
