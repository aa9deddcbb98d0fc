"""Some layers of a transformers model as a model of its own, with the same weights; the model stays as it is.

For a plain stack: embeddings, layers one after another, a norm, a head (Llama and those built like it). What
is made are copies of the two outer modules, which hold other lists of the same layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.checks import family


def stack_of(model: Any) -> Any:
    """The module that holds a model's layers, as ``layers``, and the norm after them, as ``norm``.

    Raises:
        UnsupportedModel: the model is built otherwise.
    """
    base: Any = getattr(model, model.base_model_prefix, None)
    layers = getattr(base, "layers", None)
    if (
        not isinstance(layers, nn.ModuleList)
        or not isinstance(getattr(base, "norm", None), nn.Module)
        or len(layers) != base.config.num_hidden_layers
    ):
        raise UnsupportedModel(
            f"{family(model)} is no plain stack of layers with a norm behind it, as Llama, Mistral and Qwen "
            "are, so it cannot draft with some of its layers; use another drafter"
        )
    return base


def keep_layers(model: Any, layers: Sequence[int], bare: bool = False) -> Any:
    """A model of some of another's layers.

    Args:
        layers: which, counted from 0, in their order.
        bare: leave out the norm and the head, so that its logits are the last layer's hidden states.

    Raises:
        OutpaceError: a layer that is not there, or layers out of order. UnsupportedModel: no plain stack.
    """
    base = stack_of(model)
    count = len(base.layers)
    if list(layers) != sorted(set(layers)) or any(not 0 <= layer < count for layer in layers):
        raise OutpaceError(f"layers must be ascending numbers from 0 to {count - 1}, not {list(layers)}")
    config = copy.copy(base.config)
    # Not by attribute: some configs check one of the two against the other.
    vars(config)["num_hidden_layers"] = len(layers)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        vars(config)["layer_types"] = [kinds[layer] for layer in layers]
    inner, outer = _twin(base), _twin(model)
    inner.config = config
    inner.layers = nn.ModuleList([base.layers[layer] for layer in layers])
    setattr(outer, model.base_model_prefix, inner)
    if bare:
        inner.norm = nn.Identity()
        head = model.get_output_embeddings()
        for name, module in model._modules.items():
            if module is head:
                setattr(outer, name, nn.Identity())
    return outer


def _twin(module: nn.Module) -> Any:
    """A module with the same children, parameters and hooks, whose children can be exchanged."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
