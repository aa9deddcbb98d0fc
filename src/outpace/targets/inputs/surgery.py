"""Models of a subset of a transformers model's layers, with shared weights; the model is unchanged.

For a plain stack: embeddings, a sequence of layers, a norm, a head (Llama and similar models). Only the two
outer modules are copied, with other lists of the same layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from transformers import PretrainedConfig

from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.inputs.config import family


def stack_of(model: Any) -> Any:
    """The module that contains a model's layers as ``layers`` and the norm after them as ``norm``.

    Raises:
        UnsupportedModel: the model has another structure.
    """
    base: Any = getattr(model, model.base_model_prefix, None)
    layers = getattr(base, "layers", None)
    if (
        not isinstance(layers, nn.ModuleList)
        or not isinstance(getattr(base, "norm", None), nn.Module)
        or len(layers) != base.config.num_hidden_layers
    ):
        raise UnsupportedModel(
            f"{family(model)} is not a plain stack of layers with a norm after it, as Llama, Mistral and "
            "Qwen are, so it cannot draft with some of its layers; use another drafter"
        )
    return base


def keep_layers(model: Any, layers: Sequence[int], bare: bool = False) -> Any:
    """Make a model of a subset of another model's layers.

    Args:
        layers: their indices from 0, in ascending order.
        bare: omit the norm and the head, so that the logits are the last layer's hidden states.

    Raises:
        OutpaceError: a layer does not exist, or they are out of order. UnsupportedModel: the model is not a
        plain stack.
    """
    base = stack_of(model)
    if getattr(base.config, "hidden_size_per_layer_input", None):
        raise UnsupportedModel(
            f"{family(model)} has one table of inputs for all its layers, so it cannot draft with some of "
            "them; use another drafter"
        )
    count = len(base.layers)
    if list(layers) != sorted(set(layers)) or any(not 0 <= layer < count for layer in layers):
        raise OutpaceError(f"layers must be ascending numbers from 0 to {count - 1}, not {list(layers)}")
    config = copy.copy(base.config)
    # Not set as attributes, since some configs check one of the two against the other.
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
    """Copy a model with some modules replaced; all weights are shared, and the model is unchanged.

    Args:
        change: returns the replacement of a module; None keeps it.
        attention: the copy's implementation of attention, as in ``attn_implementation``; None for the
            model's own.
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
    """Copy a module with its children, parameters and hooks, so that children and hooks can be replaced."""
    if parametrize.is_parametrized(module):  # as by weight_norm; ``copy`` refuses it
        twin: Any = type(module).__new__(type(module))
        vars(twin).update(vars(module))
    else:
        twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, value in vars(module).items():
        if "hooks" in name and isinstance(value, dict):
            vars(twin)[name] = copy.copy(value)
    return twin
