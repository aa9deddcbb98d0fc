"""Which models' layers can be fused, and the modules of a layer by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from outpace.core import UnsupportedModel
from outpace.native.layers import DTYPES, LANES, functions
from outpace.targets.cpu.kernels import rounded_panel
from outpace.targets.cpu.linear import Rounded, linears_of, rounded_of
from outpace.targets.cpu.packing import NO_MEMORY, copies_fit
from outpace.targets.inputs.attributes import attributes
from outpace.targets.inputs.changes import hooks_of
from outpace.targets.inputs.config import is_multimodal
from outpace.targets.inputs.refusals import untouchable
from outpace.targets.inputs.surgery import stack_of

# Types of one structure, and the beginning of their classes' names.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# Their classes by name, since importing them all would take long; a subclass may differ.
_KNOWN = {
    f"transformers.models.{family}.modeling_{family}.{name}{part}"
    for family, name in FAMILIES.items()
    for part in ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")
}
# Names of a layer's linear layers; those in one group have the same inputs.
GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)
HEAD_NORMS = ("q_norm", "k_norm")
HEAD_SIZE = 32  # the size of heads is a multiple of this, the hidden size of ``LANES``


def fusing_refused(model: Any, pack: bool | str, fuse: bool | Literal["auto"]) -> str:
    """The reason not to fuse a model's layers; empty to fuse them."""
    if fuse is False:
        return "fuse is off"
    if fuse == "auto" and pack is False:
        return "pack is off"
    why = why_not_fused(model)
    return why or (NO_MEMORY if fuse == "auto" and not copies_fit(model) else "")


def why_not_fused(model: Any) -> str:
    """The reason why a model's layers cannot be fused; empty if they can."""
    if why := untouchable(model):
        return why
    if model.dtype not in DTYPES:
        return f"there are no compiled steps in {model.dtype}"
    if {weight.dtype for weight in model.parameters()} != {model.dtype}:
        return "its weights have several dtypes"
    if is_multimodal(model.config):
        return "it reads more than text"
    try:
        stack = stack_of(model)
    except UnsupportedModel as error:
        return str(error)
    if any(map(hooks_of, stack.modules())):
        return "modules in it have hooks"
    linears = {*linears_of(model), *rounded_of(model)}
    if why := _unknown((model, stack, *stack.layers)):  # before the parts that only known layers have
        return why
    inner = [part for layer in stack.layers for part in (layer.self_attn, layer.mlp)]
    if why := _unknown((*inner, *norms_of(model))) or _altered(stack):
        return why
    for layer in stack.layers:
        if not linears.issuperset(_linears(layer)):
            return "some of its linear layers are quantised or replaced already"
        if not all(map(_joinable, _groups(layer))):
            return "some of its linear layers with the same inputs are rounded otherwise than others"
    config = stack.config
    heads = stack.layers[0].self_attn.head_dim
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    between = getattr(config, "intermediate_size", None) or 0
    if config.hidden_size % LANES or between < LANES or heads % HEAD_SIZE:
        return f"its hidden size is not a multiple of {LANES}, or that of its heads of {HEAD_SIZE}"
    library = functions(model.dtype)
    return library if isinstance(library, str) else ""


def _unknown(parts: Iterable[Any]) -> str:
    """The reason why these modules cannot be fused, by their classes; empty if they can."""
    for part in parts:
        kind = type(part)
        if f"{kind.__module__}.{kind.__qualname__}" not in _KNOWN:
            return f"there are no compiled steps for a {kind.__name__}"
        if kind.forward.__module__ != kind.__module__:
            return f"the forward of {kind.__name__} is not its own"
    return ""


def _altered(stack: Any) -> str:
    """The reason why compiled steps do not compute a stack's layers, if someone has changed one's attributes.

    They know a layer as its config makes it: one factor for its scores, one epsilon for its norms.
    """
    numbers = [layer.self_attn.layer_idx for layer in stack.layers]
    if len(set(numbers)) < len(numbers):
        return f"several of its layers have the same layer_idx: {numbers}"
    for number, layer in zip(numbers, stack.layers, strict=True):
        config = layer.self_attn.config
        if not 0 <= number < config.num_hidden_layers:
            return f"a layer_idx is {number}, of {config.num_hidden_layers} layers"
        with torch.device("meta"):
            made = dict(type(layer)(config, number).named_modules())
        for name, part in layer.named_modules():
            if isinstance(part, nn.Linear | Rounded):
                continue
            usual: Any = made.get(name)
            place = f"layers.{number}.{name}".rstrip(".")
            if type(usual) is not type(part):
                return f"{place} is a {type(part).__name__}"
            own = attributes(part)
            for key, value in attributes(usual).items():
                if key != "training" and own.get(key, value) != value:
                    return f"{place}.{key} is {own[key]!r} and not {value!r}"
    return ""


def fused_linears(model: Any) -> list[nn.Module]:
    """The linear layers of a model whose layers are to be fused."""
    return [linear for layer in stack_of(model).layers for linear in _linears(layer)]


def norms_of(model: Any) -> list[nn.Module]:
    """The norms of a model whose layers are to be fused."""
    stack = stack_of(model)
    norms = [stack.norm]
    for layer in stack.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for name in HEAD_NORMS if (norm := getattr(layer.self_attn, name, None)) is not None]
    return norms


def _groups(layer: Any) -> list[list[Any]]:
    """A layer's linear layers, by ``GROUPS``."""
    return [[getattr(getattr(layer, part), name) for name in names] for part, names in GROUPS]


def _linears(layer: Any) -> list[Any]:
    """A layer's linear layers, in the order of ``GROUPS``."""
    return [linear for group in _groups(layer) for linear in group]


def _joinable(group: Sequence[Any]) -> bool:
    """True if layers with the same inputs are all of floats, or rounded alike, with whole panels."""
    kinds = {linear.kernel.name if isinstance(linear, Rounded) else "" for linear in group}
    return len(kinds) == 1 and (
        kinds == {""} or not any(linear.out_features % rounded_panel() for linear in group[:-1])
    )
