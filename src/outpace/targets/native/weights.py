"""The weights of a decoder as ``native/forward.h`` reads them, and the angles of its positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel
from outpace.native.forward import ACTIVATIONS, NORMS, LayerStruct, NormStruct, ProductStruct
from outpace.native.pointers import pointer, pointer_or_null
from outpace.targets.cpu.kernels import COMPILED, QUANTISED
from outpace.targets.cpu.layouts import Blocks, Panels
from outpace.targets.cpu.linear import RoundedLinear
from outpace.targets.cpu.quants import QuantEmbedding, Quants
from outpace.targets.inputs.mapped import FileMemory
from outpace.targets.native.fitting import activation_of, head_size, linears_of_layer, stack_base
from outpace.targets.native.recipe import Recipe


class Product(NamedTuple):
    """Packed weights, their bias, and whether they are the head's."""

    packed: Panels | Blocks | Quants
    bias: Tensor | None
    head: bool


@dataclass
class Weights:
    """Packed weights of a decoder, and the modules that they were copied from.

    Attributes:
        held: modules whose weights are copied, or read in place.
        kernels: name of a kernel -> number of the model's linear layers.
        doubled: linear layers whose own weights steps no longer read.
        products: of each layer, four; then the head's.
    """

    model: Any
    recipe: Recipe
    quantise: str = ""
    held: list[nn.Module] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    doubled: list[nn.Linear] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    _kept: list[Any] = field(default_factory=list)  # whose addresses the structs have

    def __post_init__(self) -> None:
        self._files = FileMemory()
        self.base, self.dtype = stack_base(self.model), self.model.dtype
        self.config = self.base.config
        attention = getattr(self.base.layers[0], self.recipe.attention)
        self.size = head_size(self.config, attention)
        self.heads = int(self.config.num_attention_heads)
        few = None if self.recipe.by_head else getattr(self.config, "num_key_value_heads", None)
        self.shared = int(few or self.heads)
        self.hidden, self.inner = int(self.config.hidden_size), int(self.config.intermediate_size)

    def layer(self, number: int, view: int) -> LayerStruct:
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
            joined=self.product(joined, self.hidden, queries + 2 * keys, self._by_part()),
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

    def _by_part(self) -> Tensor | None:
        """All queries, all keys, all values, of outputs that have those of a head side by side."""
        if not self.recipe.by_head:
            return None
        return torch.arange(3 * self.heads * self.size).view(self.heads, 3, -1).transpose(0, 1).flatten()

    def product(
        self,
        linears: Sequence[Any],
        inputs: int,
        outputs: int,
        order: Tensor | None = None,
        head: bool = False,
    ) -> ProductStruct:
        """The struct of the product of linear layers with the same input.

        Args:
            order: numbers of their outputs in the order of the product's; None for their own.
        """
        self.held.extend(linears)
        packed, kernel = self._packed(linears, order, head)
        self.kernels.update(
            linear.kernel.name if isinstance(linear, RoundedLinear) else kernel for linear in linears
        )
        self.doubled.extend(linear for linear in linears if not isinstance(linear, RoundedLinear))
        bias = None
        if any(linear.bias is not None for linear in linears):
            parts = [
                torch.zeros(linear.out_features, dtype=self.dtype)
                if linear.bias is None
                else linear.bias.detach()
                for linear in linears
            ]
            bias = torch.cat(parts)
            bias = bias if order is None else bias[order]
        if (packed.inputs, packed.outputs) != (inputs, outputs) or packed.dtype != self.dtype:
            raise UnsupportedModel(
                f"a product is [{packed.outputs}, {packed.inputs}] where [{outputs}, {inputs}] is expected"
            )
        self._kept.append(bias)
        self.products.append(Product(packed, bias, head))
        return packed.product(bias)

    def _packed(
        self, linears: Sequence[Any], order: Tensor | None, head: bool
    ) -> tuple[Panels | Blocks | Quants, str]:
        rounded = [linear for linear in linears if isinstance(linear, RoundedLinear)]
        if rounded and isinstance(rounded[0].packed, Quants):
            return Quants.joined([linear.packed for linear in rounded]), ""
        if rounded:
            blocks = Blocks.joined([linear.packed for linear in rounded])
            for linear, part in zip(rounded, blocks.split([r.out_features for r in rounded]), strict=True):
                linear.take(part)
            return blocks, rounded[0].kernel.name
        weights = [linear.weight for linear in linears]
        if not self.quantise:
            return Panels.pack(weights, order, self._files.drop), COMPILED.name
        kernel = QUANTISED["int8" if head else self.quantise]
        kernel = kernel if kernel.fits(weights[0].shape[1]) else QUANTISED["int8"]
        return Blocks.pack(weights, kernel.bits, order, self._files.drop), kernel.name

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

    def table(self) -> Tensor | QuantEmbedding:
        """The embeddings, [vocabulary, hidden], as they are, or the module that looks them up in a file."""
        module = self.model.get_input_embeddings()
        self.held.append(module)
        if isinstance(module, QuantEmbedding):
            return module
        table: Tensor = module.weight.detach()
        self._kept.append(table)
        return table

    def factor(self) -> float:
        """What the embeddings are multiplied by."""
        module = self.model.get_input_embeddings()
        scale = getattr(module, "embed_scale", None)
        own = 1.0 if scale is None else float(scale.to(self.dtype))
        return own * self.recipe.embedding


_AROUND = ("before", "after", "between", "last")


class View(NamedTuple):
    """What some layers attend to, and how they rotate: all layers with the same one share its arrays.

    Attributes:
        window: columns that a row sees at most; 0 for all.
        rotates: the layers have rotation.
        kind: of the layers, if the rotary module is asked for it.
    """

    window: int
    rotates: bool
    kind: str


def views_of(recipe: Recipe, config: Any) -> list[View]:
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [
        View(
            recipe.window if recipe.windows is None else recipe.windows[kind],
            layer not in recipe.unrotated,
            kind if recipe.angles_by_kind else "",
        )
        for layer, kind in enumerate(kinds)
    ]


class Angles:
    """Cosines and sines of positions, as a model's rotary module gives them; asked once per position.

    Args:
        rotary: the module.
        kind: of the layers that it is asked for; "" if it knows only one.
        repeated: each angle stands twice side by side.
    """

    def __init__(self, rotary: Any, dtype: torch.dtype, kind: str, repeated: bool) -> None:
        self._rotary, self._dtype, self._kind, self._repeated = rotary, dtype, kind, repeated
        self._tables = (torch.empty(0), torch.empty(0))

    def upto(self, positions: int, most: int | None) -> tuple[Tensor, Tensor]:
        """The tables of at least this number of positions, each [positions, rotary], at most of ``most``."""
        if len(self._tables[0]) < positions:
            wanted = max(256, 1 << (positions - 1).bit_length())
            self._tables = self._made(wanted if most is None else max(min(wanted, most), positions))
        return self._tables

    @torch.inference_mode()
    def _made(self, positions: int) -> tuple[Tensor, Tensor]:
        given = torch.arange(positions)[None], *([self._kind] if self._kind else [])
        cosine, sine = self._rotary(torch.empty(1, 1, 1, dtype=self._dtype), *given)
        half = slice(0, None, 2) if self._repeated else slice(0, cosine.shape[-1] // 2)
        parts = (part[0, :, half].to(self._dtype) for part in (cosine, sine))
        first, second = (torch.cat([part, part], dim=-1).contiguous() for part in parts)
        return first, second
