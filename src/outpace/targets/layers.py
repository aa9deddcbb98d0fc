"""Some layers of a transformers model as a model of its own, with the same weights; the model stays as it is.

For a plain stack: embeddings, layers one after another, a norm, a head (Llama and those built like it). What
is made are copies of the two outer modules, which hold other lists of the same layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

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


def exchange(model: Any, change: Callable[[nn.Module], nn.Module | None], attention: str | None) -> Any:
    """A copy of a model with other modules in some places; all weights are shared, the model stays as it is.

    Args:
        change: gives the module to put in another's place; None where it stays.
        attention: implementation of attention that the copy runs on, as in ``attn_implementation``; None for
            the model's own.
    """
    twins: dict[int, Any] = {}
    configs: dict[int, Any] = {}

    def config_of(config: Any) -> Any:
        if id(config) not in configs:
            configs[id(config)] = copy.deepcopy(config)
            configs[id(config)]._attn_implementation = attention
        return configs[id(config)]

    def twin_of(module: nn.Module) -> Any:
        if id(module) not in twins:
            changed = change(module)
            twin = twins[id(module)] = _twin(module) if changed is None else changed
            if changed is None:
                twin._modules = {
                    name: None if child is None else twin_of(child) for name, child in module._modules.items()
                }
                if attention is not None and isinstance(vars(twin).get("config"), PretrainedConfig):
                    twin.config = config_of(twin.config)
        return twins[id(module)]

    return twin_of(model)


def _twin(module: nn.Module) -> Any:
    """A module with the same children, parameters and hooks, whose children and hooks can be exchanged."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, value in vars(module).items():
        if "hooks" in name and isinstance(value, dict):
            vars(twin)[name] = copy.copy(value)
    return twin
