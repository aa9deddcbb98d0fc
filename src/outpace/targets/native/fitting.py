"""Which models are computed in C, and why another is not: by its modules, their sizes and settings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from outpace.core import first_line
from outpace.native.forward import ACTIVATIONS
from outpace.native.layers import DTYPES, LANES, functions
from outpace.targets.cpu.compiled_attention import HEAD_SIZE
from outpace.targets.cpu.layouts import rounded_panel
from outpace.targets.cpu.linear import RoundedLinear, has_hooks
from outpace.targets.cpu.quants import QuantEmbedding, QuantLinear
from outpace.targets.inputs.attributes import attributes
from outpace.targets.inputs.changes import hooks_of
from outpace.targets.inputs.config import is_multimodal
from outpace.targets.inputs.refusals import why_untouchable
from outpace.targets.native.recipe import RECIPES, Recipe

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_QUANTS = "quants"
_PLAIN = frozenset((nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout))
_NORMS: dict[str, set[type]] = {"rms": set(), "wide rms": set(), "layer": {nn.LayerNorm}}


def why_not_native(model: Any) -> str | None:
    """The reason why a model has no native form; None if it has one."""
    if why := why_untouchable(model):
        return why
    recipe = recipe_of(model)
    if recipe is None:
        return f"there are no compiled steps for a {type(model).__name__}"
    if model.dtype not in DTYPES:
        return f"there are no compiled steps in {str(model.dtype).removeprefix('torch.')}"
    if {weight.dtype for weight in model.parameters() if weight.is_floating_point()} - {model.dtype}:
        return "its weights have several dtypes"
    if is_multimodal(model.config):
        return "it reads more than text"
    library = functions(model.dtype)
    if isinstance(library, str):
        return library
    base = stack_base(model)
    package = f"transformers.models.{model.config.model_type.removesuffix('_text')}."
    plain = _PLAIN | _NORMS[recipe.norm]
    for module in [model, *base.modules(), model.get_output_embeddings()]:
        if hooks_of(module):
            return "modules in it have hooks"
        kind = type(module)
        if kind in plain or isinstance(module, RoundedLinear | QuantEmbedding):
            continue
        if kind.__module__ in _ACTIVATIONS:
            continue  # whether it is the config's, ``_why_altered`` sees
        if not kind.__module__.startswith(package):
            return f"there are no compiled steps for a {kind.__name__}"
        if kind.forward.__module__ != kind.__module__:
            return f"the forward of {kind.__name__} is not its own"
    return _why_no_sizes(base, recipe) or _why_no_linears(base, recipe) or _why_altered(base, recipe)


def _why_no_sizes(base: Any, recipe: Recipe) -> str | None:
    config, first = base.config, base.layers[0]
    if len(base.layers) != config.num_hidden_layers:
        return f"it has {len(base.layers)} layers, and its config says {config.num_hidden_layers}"
    size = head_size(config, getattr(first, recipe.attention))
    if activation_of(config) not in ACTIVATIONS:
        return f"its activation is {activation_of(config)}"
    inner = getattr(config, "intermediate_size", None) or 0
    if config.hidden_size % LANES or inner < LANES or size % HEAD_SIZE:
        return f"its hidden size is not a multiple of {LANES}, or that of its heads of {HEAD_SIZE}"
    if getattr(config, "qk_layernorm", False):
        return "each of its heads has a norm of its own"
    if getattr(config, "use_qk_norm", False) or getattr(config, "use_bidirectional_attention", False):
        return "its attention has a form of its own"
    return None


def _why_no_linears(base: Any, recipe: Recipe) -> str | None:
    for layer in base.layers:
        for group in linears_of_layer(layer, recipe):
            if any(
                type(linear) is not nn.Linear and not isinstance(linear, RoundedLinear) for linear in group
            ):
                return "some of its linear layers are quantised or replaced already"
            if any(has_hooks(linear) for linear in group):
                return "modules in it have hooks"
            kinds = {_rounding_of(linear) for linear in group}
            apart = kinds - {"", _QUANTS} and any(
                linear.out_features % rounded_panel() for linear in group[:-1]
            )
            if len(kinds) > 1 or apart:
                return "some of its linear layers with the same inputs are rounded otherwise than others"
    return None


def _rounding_of(linear: Any) -> str:
    """How the weights of a linear layer are rounded; those of GGUF files join, whatever their types are."""
    if isinstance(linear, QuantLinear):
        return _QUANTS
    return str(linear.kernel.name) if isinstance(linear, RoundedLinear) else ""


def recipe_of(model: Any) -> Recipe | None:
    """The recipe of a model, whose classes are those of its type; None if there is none."""
    config = model.config
    make = RECIPES.get(config.model_type)
    if make is None:
        return None
    recipe = make(config)
    parts = type(model).__name__, type(stack_base(model)).__name__
    return recipe if all(part.startswith(recipe.stem) for part in parts) else None


def stack_base(model: Any) -> Any:
    """The module that contains the layers."""
    return getattr(model, model.base_model_prefix)


def activation_of(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def head_size(config: Any, attention: Any) -> int:
    found = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    return int(found or config.hidden_size // config.num_attention_heads)


def linears_of_layer(layer: Any, recipe: Recipe) -> list[list[Any]]:
    """A layer's linear layers, grouped by their input: joined, output, up, down."""
    attention, feed = getattr(layer, recipe.attention), getattr(layer, recipe.feed)
    parts = (
        (attention, recipe.joined),
        (attention, (recipe.output,)),
        (feed, recipe.up),
        (feed, (recipe.down,)),
    )
    return [[getattr(part, name) for name in names] for part, names in parts]


def _same(one: Any, other: Any) -> bool:
    """True if two settings are equal; partial functions are if their parts are."""
    if isinstance(one, partial) and isinstance(other, partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    return bool(one == other)


def _why_altered(base: Any, recipe: Recipe) -> str | None:
    """The reason why a recipe does not describe the layers, if someone has changed one's attributes.

    It knows a layer as its config makes it: one factor for its scores, one epsilon for its norms.
    """
    numbers = [getattr(layer, recipe.attention).layer_idx for layer in base.layers]
    if len(set(numbers)) < len(numbers):
        return f"several of its layers have the same layer_idx: {numbers}"
    for number, layer in zip(numbers, base.layers, strict=True):
        config = getattr(layer, recipe.attention).config
        if not 0 <= number < config.num_hidden_layers:
            return f"a layer_idx is {number}, of {config.num_hidden_layers} layers"
        try:
            with torch.device("meta"):
                made = dict(type(layer)(config, number).named_modules())
        except Exception as error:  # of a config that was changed since, whatever its entries are now
            return f"its config makes no such layer: {first_line(error)}"
        for name, part in layer.named_modules():
            if isinstance(part, nn.Linear | RoundedLinear | QuantEmbedding):
                continue
            usual: Any = made.get(name)
            place = f"layers.{number}.{name}".rstrip(".")
            if type(usual) is not type(part):
                return f"{place} is a {type(part).__name__}"
            own = attributes(part)
            for key, value in attributes(usual).items():
                if key != "training" and not _same(own.get(key, value), value):
                    return f"{place}.{key} is {own[key]!r} and not {value!r}"
    return None
