"""The weights of a decoder as ``native/forward.h`` reads them, and the reasons why a model has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from outpace.core import UnsupportedModel
from outpace.native.forward import ACTIVATIONS, NORMS, LayerStruct, NormStruct, ProductStruct
from outpace.native.layers import DTYPES, LANES, functions
from outpace.native.pointers import pointer, pointer_or_null
from outpace.targets.cpu.compiled_attention import HEAD_SIZE
from outpace.targets.cpu.kernels import COMPILED, QUANTISED, Blocks, Panels, multiply, rounded_panel
from outpace.targets.cpu.linear import Rounded, has_hooks
from outpace.targets.inputs.changes import hooks_of
from outpace.targets.inputs.config import is_multimodal
from outpace.targets.inputs.refusals import untouchable
from outpace.targets.kernel import Kernel
from outpace.targets.native.recipe import RECIPES, Recipe


def why_not_native(model: Any) -> str | None:
    """The reason why a model has no native form; None if it has one."""
    if why := untouchable(model):
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
    plain = {*_PLAIN, type(ACT2FN[activation_of(base.config)])} | ({nn.LayerNorm} & _NORMS[recipe.norm])
    for module in [model, *base.modules(), model.get_output_embeddings()]:
        if hooks_of(module):
            return "modules in it have hooks"
        kind = type(module)
        if kind not in plain and not kind.__module__.startswith(package) and not isinstance(module, Rounded):
            return f"there are no compiled steps for a {kind.__name__}"
    return _why_no_sizes(base, recipe) or _why_no_linears(base, recipe)


def _why_no_sizes(base: Any, recipe: Recipe) -> str | None:
    config, first = base.config, base.layers[0]
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
            if any(type(linear) is not nn.Linear and not isinstance(linear, Rounded) for linear in group):
                return "some of its linear layers are quantised or replaced already"
            if any(has_hooks(linear) for linear in group):
                return "modules in it have hooks"
            kinds = {linear.kernel.name if isinstance(linear, Rounded) else "" for linear in group}
            apart = kinds != {""} and any(linear.out_features % rounded_panel() for linear in group[:-1])
            if len(kinds) > 1 or apart:
                return "some of its linear layers with the same inputs are rounded otherwise than others"
    return None


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


@dataclass
class Weights:
    """Packed weights of a decoder, and the modules that they were copied from.

    Attributes:
        held: modules whose weights are copied, or read in place.
        kernels: name of a kernel -> number of the model's linear layers.
        doubled: linear layers whose own weights steps no longer read.
    """

    model: Any
    recipe: Recipe
    quantise: str = ""
    held: list[nn.Module] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    doubled: list[nn.Linear] = field(default_factory=list)
    _kept: list[Any] = field(default_factory=list)  # whose addresses the structs have

    def __post_init__(self) -> None:
        self.base, self.dtype = stack_base(self.model), self.model.dtype
        self.config = self.base.config
        attention = getattr(self.base.layers[0], self.recipe.attention)
        self.size = head_size(self.config, attention)
        self.heads = int(self.config.num_attention_heads)
        few = None if self.recipe.by_head else getattr(self.config, "num_key_value_heads", None)
        self.shared = int(few or self.heads)
        self.hidden, self.inner = int(self.config.hidden_size), int(self.config.intermediate_size)

    def layer(self, number: int, view: int) -> LayerStruct:
        """The struct of a layer."""
        recipe, module = self.recipe, self.base.layers[number]
        attention = getattr(module, recipe.attention)
        joined, output, up, down = linears_of_layer(module, recipe)
        queries, keys = self.heads * self.size, self.shared * self.size
        norms = {name: self.norm(module, getattr(recipe, name), self.hidden) for name in _AROUND}
        pair = [getattr(attention, name, None) is not None for name in ("q_norm", "k_norm")]
        whole = recipe.whole and all(pair)
        each = all(pair) and not whole
        q, k = (queries, keys) if whole else (self.size, self.size)
        of_heads = [
            self.norm(attention, name if all(pair) else "", n) for name, n in (("q_norm", q), ("k_norm", k))
        ]
        none = NormStruct()
        return LayerStruct(
            joined=self.product(joined, self.hidden, queries + 2 * keys, partial(self._by_part)),
            output=self.product(output, queries, self.hidden),
            gates=self.product(up, self.hidden, self.inner * (1 + recipe.gated)),
            down=self.product(down, self.inner, self.hidden),
            **norms,
            queries=of_heads[0] if whole else none,
            keys=of_heads[1] if whole else none,
            each_query=of_heads[0] if each else none,
            each_key=of_heads[1] if each else none,
            scale=float(attention.scaling),
            cap=float(getattr(self.config, "attn_logit_softcapping", None) or 0),
            residual=recipe.residual,
            heads=self.heads,
            shared=self.shared,
            size=self.size,
            view=view,
            activation=ACTIVATIONS[activation_of(self.config)],
            gated=recipe.gated,
            parallel=recipe.parallel,
        )

    def _by_part(self, matrix: Tensor) -> Tensor:
        """All queries, all keys, all values, of outputs that have those of a head side by side."""
        if not self.recipe.by_head:
            return matrix
        parts: Tensor = matrix.unflatten(0, (self.heads, 3, self.size)).transpose(0, 1).flatten(0, 2)
        return parts

    def product(
        self,
        linears: Sequence[Any],
        inputs: int,
        outputs: int,
        order: Callable[[Tensor], Tensor] = lambda matrix: matrix,
        head: bool = False,
    ) -> ProductStruct:
        """The struct of the product of linear layers with the same input."""
        self.held.extend(linears)
        packed, kernel = self._packed(linears, order, head)
        self.kernels[kernel] += len(linears)
        self.doubled.extend(linear for linear in linears if not isinstance(linear, Rounded))
        bias = None
        if any(linear.bias is not None for linear in linears):
            parts = [
                torch.zeros(linear.out_features, dtype=self.dtype)
                if linear.bias is None
                else linear.bias.detach()
                for linear in linears
            ]
            bias = order(torch.cat(parts)).contiguous()
        if (packed.inputs, packed.outputs) != (inputs, outputs) or packed.dtype != self.dtype:
            raise UnsupportedModel(
                f"a product is [{packed.outputs}, {packed.inputs}] where [{outputs}, {inputs}] is expected"
            )
        self._kept += [packed, bias]
        self._compare(packed, linears, order)
        return packed.product(bias)

    def _compare(
        self, packed: Panels | Blocks, linears: Sequence[Any], order: Callable[[Tensor], Tensor]
    ) -> None:
        """Compare the product of a row of random numbers with torch's.

        So that a mistake in the weights of a layer is seen whichever layers the self-test looks at.

        Raises:
            UnsupportedModel: it is another one.
        """
        if isinstance(linears[0], Rounded):
            return  # read from a checkpoint, whose floats are not there
        row = torch.randn(1, packed.inputs, generator=torch.Generator().manual_seed(0)).to(self.dtype)
        found = multiply(row, packed, None).float()
        parts = [nn.functional.linear(row, linear.weight.detach()) for linear in linears]
        right = order(torch.cat(parts, dim=1).T).T.float()
        limit = _ROUNDED if isinstance(packed, Blocks) else _PACKED
        if not float((found - right).norm()) <= limit * float(right.norm()):
            raise UnsupportedModel("the product of a linear layer differs from torch's")

    def _packed(
        self, linears: Sequence[Any], order: Callable[[Tensor], Tensor], head: bool
    ) -> tuple[Panels | Blocks, str]:
        rounded = [linear for linear in linears if isinstance(linear, Rounded)]
        if rounded:
            blocks = Blocks.joined([linear.packed for linear in rounded])
            for linear, part in zip(rounded, blocks.split([r.out_features for r in rounded]), strict=True):
                linear.take(part)
            return blocks, rounded[0].kernel.name
        weight = order(torch.cat([linear.weight.detach() for linear in linears]))
        kernels: list[Kernel] = [COMPILED]
        if self.quantise:
            first = "int8" if head else self.quantise
            kernels = [QUANTISED[first], QUANTISED["int8"]]
        for kernel in kernels:
            if (packed := kernel.pack(weight)) is not None:
                return packed, kernel.name
        raise UnsupportedModel("no kernel takes its linear layers")

    def norm(self, owner: Any, name: str, size: int) -> NormStruct:
        """The struct of a norm, by its name in a module; of none if the name is empty."""
        module = getattr(owner, name) if name else None
        if module is None:
            return NormStruct()
        self.held.append(module)
        weight = module.weight.detach().float() + self.recipe.plus_one
        bias = None if getattr(module, "bias", None) is None else module.bias.detach().float()
        self._kept += [weight, bias]
        epsilon: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        return NormStruct(
            weight=pointer(weight, torch.float32, size),
            bias=pointer_or_null(bias, torch.float32, size),
            epsilon=float(epsilon),
            kind=NORMS[self.recipe.norm],
        )

    def table(self) -> Tensor:
        """The embeddings, [vocabulary, hidden], as they are."""
        module = self.model.get_input_embeddings()
        self.held.append(module)
        table: Tensor = module.weight.detach()
        self._kept.append(table)
        return table

    def factor(self) -> float:
        """What the embeddings are multiplied by."""
        module = self.model.get_input_embeddings()
        scale = getattr(module, "embed_scale", None)
        own = 1.0 if scale is None else float(torch.as_tensor(scale).to(self.dtype))
        return own * self.recipe.embedding


_PLAIN = frozenset((nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout))
_NORMS: dict[str, set[type]] = {"rms": set(), "wide rms": set(), "layer": {nn.LayerNorm}}
# Share of a product by which rounded weights and rows, or the order of its sums alone, may change it.
_ROUNDED, _PACKED = 0.5, 0.05
_AROUND = ("before", "after", "between", "last")
