"""Layers whose operations between the matrix products are compiled functions (``native.c``), on a CPU.

A step of a small model in eager mode consists of thousands of small operations, which together take about as
long as its products. A fused layer has nine: four products, two norms, attention (with rotation, the heads'
norms and the cache's update), the gate, a sum. Its products of the same input are one.

It rounds where transformers' layer does, but sums in another order. A row's result does not depend on the
other rows, on their number, or on where its columns are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from outpace.cache import Window
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.checks import family, is_multimodal, untouchable
from outpace.targets.inputs import CacheAdapter
from outpace.targets.layers import stack_of
from outpace.targets.lines import Line, parts_in
from outpace.targets.native import (
    DTYPES,
    LayerStruct,
    RowsStruct,
    address,
    byref,
    functions,
    pointer,
)
from outpace.targets.packed import Linear, copies_fit, linears_of

# Layers of one structure, by name, since importing them all would take long.
_KNOWN = {
    f"transformers.models.{family}.modeling_{family}.{name}DecoderLayer"
    for family, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))
}
# Names of a layer's linear layers; those in one group have the same inputs.
_GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)
_SIZE, _HEAD_SIZE = 16, 32  # the hidden size and that of heads are multiples of these

Join = Callable[[Sequence[nn.Linear]], nn.Module]


def fusing_refused(model: Any, pack: bool | Literal["auto"], fuse: bool | Literal["auto"]) -> str:
    """The reason not to fuse a model's layers; empty to fuse them.

    Raises:
        UnsupportedModel: ``fuse`` is True, but they cannot be fused.
    """
    if fuse is False:
        return "fuse is off"
    if fuse == "auto" and pack is False:
        return "pack is off"
    why = why_not_fused(model)
    if fuse is True and why:
        raise UnsupportedModel(f"{family(model)} cannot be fused: {why}; leave fuse out")
    if not why and fuse == "auto" and not copies_fit(model):
        return "too little memory is free for copies of its weights"
    return why


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
    linears = set(linears_of(model))
    for layer in stack.layers:
        kind = type(layer)
        if f"{kind.__module__}.{kind.__qualname__}" not in _KNOWN:
            return f"there are no compiled steps for a {kind.__name__}"
        if not linears.issuperset(_linears(layer)):
            return "some of its linear layers have hooks, or are quantised or replaced already"
    config = stack.config
    heads = stack.layers[0].self_attn.head_dim
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    if config.hidden_size % _SIZE or config.intermediate_size < _SIZE or heads % _HEAD_SIZE:
        return f"its hidden size is not a multiple of {_SIZE}, or that of its heads of {_HEAD_SIZE}"
    found = functions(model.dtype)
    return found if isinstance(found, str) else ""


def fused_linears(model: Any) -> list[nn.Linear]:
    """The linear layers of a model whose layers are to be fused."""
    return [linear for layer in stack_of(model).layers for linear in _linears(layer)]


def _linears(layer: Any) -> list[nn.Linear]:
    """A layer's linear layers, in the order of ``_GROUPS``."""
    return [getattr(getattr(layer, part), name) for part, names in _GROUPS for name in names]


def fuse_layers(model: Any, step: Any, join: Join) -> None:
    """Fuse the layers of a model's copy.

    Args:
        model: a model of which ``fusing_refused`` is empty.
        step: its copy (``exchange``), with the linear layers in ``fused_linears`` as they are.
        join: makes one linear layer of several with the same inputs.
    """
    stack = stack_of(step)
    for own, layer in zip(stack_of(model).layers, stack.layers, strict=True):
        products = []
        for part, names in _GROUPS:
            linears = [getattr(getattr(own, part), name) for name in names]
            whole, start = join(linears), 0
            for name, linear in zip(names, linears, strict=True):
                stop = start + linear.out_features
                setattr(getattr(layer, part), name, _Part(whole, start, stop) if linears[1:] else whole)
                start = stop
            products.append(whole)
        kind: Any = type(layer)
        layer.__class__ = _fused(kind)
        layer.take(products)
    norm = stack.norm
    stack.norm = _Norm(norm.weight, norm.variance_epsilon)


class _Part(nn.Module):
    """Some outputs of linear layers that were joined, for the layer's own forward."""

    def __init__(self, whole: nn.Module, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor = self.whole(states)
        return product[..., self.start : self.stop]


class _Norm(nn.Module):
    """A root mean square norm."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, states: Tensor) -> Tensor:
        given, out = states.contiguous(), torch.empty_like(states, memory_format=torch.contiguous_format)
        rows, size = given.numel() // given.shape[-1], given.shape[-1]
        found: Any = functions(states.dtype)
        found.norm(rows, size, pointer(given), None, pointer(self.weight), self.epsilon, None, pointer(out))
        return out


class _Shape(NamedTuple):
    """Sizes of a layer, its weights outside the products, and the products by group."""

    heads: int
    shared: int  # heads that have keys
    size: int  # of a head
    scale: float
    inner: int  # of the gate
    before: Tensor  # weights of the norms before attention and before the gate
    between: Tensor
    query_norm: Tensor | None  # of the heads' norms
    key_norm: Tensor | None
    epsilon: float
    products: tuple[Callable[[Tensor], Tensor], ...]


class _Fused(nn.Module):
    """A layer of ``_KNOWN``; without a window of a cache its own class's forward runs, on joined products."""

    def take(self, products: Sequence[nn.Module]) -> None:
        """Set the layer's products, in the order of ``_GROUPS``."""
        own: Any = self
        attention, config = own.self_attn, own.self_attn.config
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        vars(self)["_shape"] = _Shape(
            heads=config.num_attention_heads,
            shared=config.num_key_value_heads,
            size=attention.head_dim,
            scale=attention.scaling,
            inner=config.intermediate_size,
            before=own.input_layernorm.weight,
            between=own.post_attention_layernorm.weight,
            query_norm=norms[0] and norms[0].weight,
            key_norm=norms[1] and norms[1].weight,
            epsilon=own.input_layernorm.variance_epsilon,
            # Without a module's call around each, which takes a few microseconds.
            products=tuple(one.of_rows if isinstance(one, Linear) else one.forward for one in products),
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **more: Any,
    ) -> Tensor:
        assert position_embeddings is not None
        if type(past_key_values) is not CacheAdapter or not isinstance(past_key_values.window, Window | Line):
            unfused: Tensor = super().forward(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **more,
            )
            return unfused
        shape: _Shape = vars(self)["_shape"]
        found: Any = functions(hidden_states.dtype)
        joined, output, gates, down = shape.products
        given = hidden_states.reshape(-1, hidden_states.shape[-1])
        count, size = given.shape
        state = torch.empty_like(given)
        place, room = pointer(state), pointer(given)
        found.norm(count, size, room, None, pointer(shape.before), shape.epsilon, None, place)
        attended = self._attended(found, joined(state), attention_mask, past_key_values, position_embeddings)
        result = torch.empty_like(given)
        added = output(attended)
        found.norm(
            count,
            size,
            room,
            pointer(added),
            pointer(shape.between),
            shape.epsilon,
            pointer(result),
            place,
        )
        both = gates(state)
        inner = both.new_empty((count, shape.inner))
        gate = both.data_ptr()
        up = gate + shape.inner * both.element_size()
        found.gated(count, shape.inner, gate, up, 2 * shape.inner, pointer(inner))
        return result.add_(down(inner)).view(hidden_states.shape)

    def _attended(
        self,
        found: Any,
        product: Tensor,
        mask: Tensor | None,
        cache: CacheAdapter,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attention of the rows with these queries, keys and values, [n, heads * size]."""
        shape: _Shape = vars(self)["_shape"]
        parts = cache.shared.get(id(mask))
        if parts is None:
            parts = cache.shared[id(mask)] = _rows_of(shape, found, mask, cache.window, rotation)
        attention: Any = self.self_attn
        out = product.new_zeros((len(product), shape.heads * shape.size))  # for padding at a line's end
        item, stride = product.element_size(), product.shape[1]
        for start, window, rows in parts:
            keys, values = cache.buffers(attention.layer_idx, window)
            query = product.data_ptr() + start * stride * item
            key = query + shape.heads * shape.size * item
            layer = LayerStruct(
                query,
                key,
                key + shape.shared * shape.size * item,
                stride,
                stride,
                stride,
                pointer(shape.query_norm),
                pointer(shape.key_norm),
                shape.epsilon,
                shape.scale,
                keys.data_ptr(),
                values.data_ptr(),
                keys.stride(0),
                keys.stride(1),
                out.data_ptr() + start * shape.heads * shape.size * item,
            )
            if found.attention(byref(rows.struct), byref(layer)):
                raise MemoryError("attention found no memory for its workspace")
        return out


@lru_cache(maxsize=8)
def _fused(kind: Any) -> Any:
    """A subclass of fused layers of this class, so that lookups by class still find them."""
    return type(f"Fused{kind.__name__}", (_Fused, kind), {})


def _rows_of(
    shape: _Shape, found: Any, mask: Tensor | None, window: Any, rotation: tuple[Tensor, Tensor]
) -> list[tuple[int, Window, _Rows]]:
    """The rows of each window of a forward, after the number of rows before them."""
    if isinstance(window, Window):
        return [(0, window, _Rows(shape, found, mask, None, window, rotation))]
    assert mask is not None
    rows = []
    for part in parts_in(mask):
        own = rotation[0][:, part.span], rotation[1][:, part.span]
        found_rows = _Rows(shape, found, part.mask, part.cells, part.window, own)
        rows.append((part.span.start, part.window, found_rows))
    return rows


class _Rows:
    """The rows of a window and the columns that each attends to, as ``native.c`` reads them.

    Args:
        mask: boolean [B, 1, width, columns], of rows in a line too; None or without columns if each row
            attends to all before it.
        line: places of the rows in the window, if they are in a line and not all of it.
        rotation: cosines and sines of the rows' positions, each [B or 1, width, size].
    """

    def __init__(
        self,
        shape: _Shape,
        found: Any,
        mask: Tensor | None,
        line: Tensor | None,
        window: Window,
        rotation: tuple[Tensor, Tensor],
    ) -> None:
        batch, width = len(window.slots), window.width
        cells = np.arange(batch * width) if line is None else line.numpy()
        grid = np.full((batch, width), -1, dtype=np.int32)
        for row, offset, own in zip(grid, window.offsets, window.widths, strict=True):
            row[:own] = np.arange(offset, offset + own)
        place = np.ascontiguousarray(grid.reshape(-1)[cells])
        sequence = (cells // width).astype(np.int32)
        order = np.argsort(sequence, kind="stable").astype(np.int32)
        begin = np.searchsorted(sequence[order], np.arange(batch + 1)).astype(np.int32)
        self._arrays = [order, begin, sequence, place, *_columns(found, mask, cells, place)]
        count = len(cells)
        size = shape.size
        grid_shape = (batch, width, size) if line is None else (1, count, size)
        self._rotation = [one.expand(grid_shape).reshape(count, size) for one in rotation]
        self._queries = torch.empty(count * shape.heads * size)
        self.struct = RowsStruct(
            count,
            batch,
            shape.heads,
            shape.shared,
            size,
            *map(address, self._arrays),
            *map(pointer, self._rotation),
            pointer(self._queries),
        )


def _columns(found: Any, mask: Tensor | None, cells: Any, place: Any) -> list[Any]:
    """The arrays ``first``, ``run``, ``count``, ``start`` and ``columns`` of ``struct rows``."""
    rows = len(cells)
    if mask is None or not mask.shape[-1]:
        zeros, run = np.zeros(rows, dtype=np.int32), place + 1  # none for padding
        return [zeros, run, run, zeros, zeros]
    if mask.dtype != torch.bool:
        raise OutpaceError(f"a fused layer takes boolean masks, not {mask.dtype}")
    seen = mask.contiguous()
    at = cells.astype(np.int32)
    assert len(seen) * seen.shape[2] > at.max()  # read_mask trusts it
    first, run, count, start = np.empty((4, rows), dtype=np.int32)
    given = (seen.data_ptr(), rows, seen.shape[-1], *map(address, (at, place, first, run, count, start)))
    listed = np.empty(max(found.read_mask(*given, None), 1), dtype=np.int32)
    found.read_mask(*given, address(listed))
    return [first, run, count, start, listed]
