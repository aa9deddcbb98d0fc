"""A fused layer's sizes and weights, as ``native/layers.c`` reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.native.layers import BlockStruct
from outpace.native.pointers import check, pointer
from outpace.targets.cpu.fusible import HEAD_NORMS
from outpace.targets.cpu.kernels import Blocks, Panels
from outpace.targets.cpu.linear import Linear


class Layer(NamedTuple):
    """A layer's sizes, its weights outside the products, and the products by group."""

    number: int  # in the model
    heads: int
    shared: int  # heads that have keys
    size: int  # of a head
    scale: float
    inner: int  # of the gate
    # Weights of the norms before attention and before the gate; detached, as ``held`` are, so that their
    # memory remains if the model's data are replaced.
    before: Tensor
    between: Tensor
    query_norm: Tensor | None  # of the heads' norms
    key_norm: Tensor | None
    epsilon: float
    products: tuple[Callable[[Tensor], Tensor], ...]
    block: Any  # pointer to products and norms, if all products are compiled
    held: tuple[Tensor, ...]  # biases whose addresses it has

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.heads, self.shared, self.size, self.inner


def layer_of(module: Any, products: Sequence[nn.Module]) -> Layer:
    """The sizes and weights of a layer's module, with its products in the order of ``GROUPS``."""
    attention, config = module.self_attn, module.self_attn.config
    norms = [getattr(attention, name, None) for name in HEAD_NORMS]
    before, between = (
        norm.weight.detach() for norm in (module.input_layernorm, module.post_attention_layernorm)
    )
    linears = [linear for linear in products if isinstance(linear, Linear)]
    biases = [linear.bias if linear.bias is None else linear.bias.detach() for linear in linears]
    compiled = [
        linear.kernel.product(linear.packed, bias) for linear, bias in zip(linears, biases, strict=True)
    ]
    _check_sizes(attention, products, before.dtype)
    epsilon, block = module.input_layernorm.variance_epsilon, None
    if len(linears) == len(products) and None not in compiled:
        joined, output, gates, down = compiled
        block = BlockStruct(
            joined=joined,
            output=output,
            gates=gates,
            down=down,
            before=pointer(before, before.dtype, config.hidden_size),
            between=pointer(between, before.dtype, config.hidden_size),
            epsilon=epsilon,
        )
    return Layer(
        number=attention.layer_idx,
        heads=config.num_attention_heads,
        shared=config.num_key_value_heads,
        size=attention.head_dim,
        scale=attention.scaling,
        inner=config.intermediate_size,
        before=before,
        between=between,
        query_norm=norms[0] and norms[0].weight,
        key_norm=norms[1] and norms[1].weight,
        epsilon=epsilon,
        # Without a module's call around each, which takes a few microseconds.
        products=tuple(
            linear.multiply if isinstance(linear, Linear) else linear.forward for linear in products
        ),
        block=None if block is None else ctypes.pointer(block),
        held=tuple(bias for bias in biases if bias is not None),
    )


def _check_sizes(attention: Any, products: Sequence[Any], dtype: torch.dtype) -> None:
    """Refuse products that are not what the compiled layer takes them for."""
    config, size = attention.config, attention.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    found = [(linear.in_features, linear.out_features) for linear in products]
    sizes = [(hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)]
    check(found == sizes, f"products with inputs and outputs {sizes}, not {found}")
    packed = [linear.packed for linear in products if isinstance(linear, Linear)]
    panels = [weights for weights in packed if isinstance(weights, Panels | Blocks)]
    check(all(weights.dtype == dtype for weights in panels), f"products of rows in {dtype}")
