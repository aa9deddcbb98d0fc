"""Layers that are compiled functions (``native/layers.c``), on a CPU.

A step of a small model in eager mode consists of thousands of small operations, which together take about as
long as its products. A fused layer has nine: four products, two norms, attention (with rotation, the heads'
norms and the cache's update), the gate, a sum. Its products of the same input are one. If the products are
compiled too, one call runs all layers; otherwise they are called one by one.

It rounds where transformers' layer does, but sums in another order. A row's result does not depend on the
other rows, on their number, or on where its columns are in the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from outpace.cache import Window
from outpace.core import OutpaceError, UnsupportedModel
from outpace.native.layers import (
    DTYPES,
    LANES,
    BlockStruct,
    HeadsStruct,
    RoomStruct,
    RowsStruct,
    byref,
    functions,
)
from outpace.native.pointers import address, check, pointer, pointer_or_null, rows_pointer
from outpace.targets.cpu.kernels import Panels
from outpace.targets.cpu.linear import NO_MEMORY, Linear, Norm, copies_fit, linears_of
from outpace.targets.inputs.changes import hooks_of
from outpace.targets.inputs.config import CACHE, is_multimodal
from outpace.targets.inputs.forward import CacheAdapter
from outpace.targets.inputs.line import Line, parts_in
from outpace.targets.inputs.refusals import untouchable
from outpace.targets.inputs.surgery import stack_of

# Classes of one structure, by name, since importing them all would take long; a subclass may differ.
_KNOWN = {
    f"transformers.models.{family}.modeling_{family}.{name}{part}"
    for family, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))
    for part in ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")
}
# Names of a layer's linear layers; those in one group have the same inputs.
_GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)
_HEAD_NORMS = ("q_norm", "k_norm")
_FUSED = "_outpace_layer"  # where a module keeps its ``_Layer``
_INT = np.dtype(np.int32)
_HEAD_SIZE = 32  # the size of heads is a multiple of this, the hidden size of ``LANES``

Join = Callable[[Sequence[nn.Linear]], nn.Module]


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
    linears = set(linears_of(model))
    if why := _unknown((model, stack, *stack.layers)):  # before the parts that only known layers have
        return why
    inner = [part for layer in stack.layers for part in (layer.self_attn, layer.mlp)]
    if why := _unknown((*inner, *norms_of(model))):
        return why
    for layer in stack.layers:
        if not linears.issuperset(_linears(layer)):
            return "some of its linear layers are quantised or replaced already"
    config = stack.config
    heads = stack.layers[0].self_attn.head_dim
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    between = getattr(config, "intermediate_size", None) or 0
    if config.hidden_size % LANES or between < LANES or heads % _HEAD_SIZE:
        return f"its hidden size is not a multiple of {LANES}, or that of its heads of {_HEAD_SIZE}"
    found = functions(model.dtype)
    return found if isinstance(found, str) else ""


def _unknown(parts: Iterable[Any]) -> str:
    """The reason why these modules cannot be fused, by their classes; empty if they can."""
    for part in parts:
        kind = type(part)
        if f"{kind.__module__}.{kind.__qualname__}" not in _KNOWN:
            return f"there are no compiled steps for a {kind.__name__}"
    return ""


def fused_linears(model: Any) -> list[nn.Linear]:
    """The linear layers of a model whose layers are to be fused."""
    return [linear for layer in stack_of(model).layers for linear in _linears(layer)]


def norms_of(model: Any) -> list[nn.Module]:
    """The norms of a model whose layers are to be fused."""
    stack = stack_of(model)
    norms = [stack.norm]
    for layer in stack.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [one for name in _HEAD_NORMS if (one := getattr(layer.self_attn, name, None)) is not None]
    return norms


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
        vars(layer)[_FUSED] = _layer(layer, products)
    sizes = {vars(layer)[_FUSED].sizes for layer in stack.layers}
    check(len(sizes) == 1, f"layers of the same sizes, not {sizes}")
    norm = stack.norm
    stack.norm = Norm(norm.weight, norm.variance_epsilon)
    kind: Any = type(step)
    step.__class__ = _fused(kind)


class _Part(nn.Module):
    """Some outputs of linear layers that were joined, for the layer's own forward."""

    def __init__(self, whole: nn.Module, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor = self.whole(states)
        return product[..., self.start : self.stop]


class _Layer(NamedTuple):
    """A layer's sizes, its weights outside the products, and the products by group."""

    place: int  # in the model
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


def _layer(own: Any, products: Sequence[nn.Module]) -> _Layer:
    """The sizes and weights of a layer's module, with its products in the order of ``_GROUPS``."""
    attention, config = own.self_attn, own.self_attn.config
    norms = [getattr(attention, name, None) for name in _HEAD_NORMS]
    before, between = (one.weight.detach() for one in (own.input_layernorm, own.post_attention_layernorm))
    linears = [one for one in products if isinstance(one, Linear)]
    biases = [None if one.bias is None else one.bias.detach() for one in linears]
    each = [one.kernel.product(one.packed, bias) for one, bias in zip(linears, biases, strict=True)]
    _check_sizes(attention, products, before.dtype)
    epsilon, block = own.input_layernorm.variance_epsilon, None
    if len(linears) == len(products) and None not in each:
        joined, output, gates, down = each
        block = BlockStruct(
            joined=joined,
            output=output,
            gates=gates,
            down=down,
            before=pointer(before, before.dtype, config.hidden_size),
            between=pointer(between, before.dtype, config.hidden_size),
            epsilon=epsilon,
        )
    return _Layer(
        place=attention.layer_idx,
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
        products=tuple(one.of_rows if isinstance(one, Linear) else one.forward for one in products),
        block=None if block is None else ctypes.pointer(block),
        held=tuple(bias for bias in biases if bias is not None),
    )


def _check_sizes(attention: Any, products: Sequence[Any], dtype: torch.dtype) -> None:
    """Refuse products that are not what the compiled layer takes them for."""
    config, size = attention.config, attention.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    found = [(one.in_features, one.out_features) for one in products]
    sizes = [(hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)]
    check(found == sizes, f"products with inputs and outputs {sizes}, not {found}")
    packed = [one.packed for one in products if isinstance(one, Linear) and isinstance(one.packed, Panels)]
    check(all(own.dtype == dtype for own in packed), f"products of rows in {dtype}")


class _Output(NamedTuple):
    """Logits and hidden states of a fused model."""

    logits: Tensor
    hidden_states: Sequence[Tensor]  # the embeddings and each layer's result, the last one after the norm


class _Model(nn.Module):
    """A model with fused layers: the forward of transformers' models of these families, and no more.

    Without a window of a cache its own class's forward runs, on joined products.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool = False,
        **more: Any,
    ) -> Any:
        cache = more.get(CACHE)
        if type(cache) is not CacheAdapter or not isinstance(cache.window, Window | Line):
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                logits_to_keep=logits_to_keep,
                output_hidden_states=output_hidden_states,
                **more,
            )
        own: Any = self
        stack = getattr(own, own.base_model_prefix)
        states: Tensor = stack.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        masks = [attention_mask] * len(stack.layers)
        if isinstance(attention_mask, dict):
            masks = [attention_mask[kind] for kind in stack.config.layer_types]
        rotation = stack.rotary_emb(states, position_ids=position_ids)
        layers: list[_Layer] = [vars(layer)[_FUSED] for layer in stack.layers]
        if states.dtype != layers[0].before.dtype:  # the functions would read past the end of the weights
            raise OutpaceError(
                f"the rows are {states.dtype}, but this target was made for {layers[0].before.dtype}; make a "
                "new target after converting a model"
            )
        given = states.reshape(-1, states.shape[-1]).contiguous()
        by_mask = {id(mask): mask for mask in masks}
        rows = {key: _rows_of(layers[0], mask, cache, rotation) for key, mask in by_mask.items()}
        last_rows = [start + part.count for parts in rows.values() for start, _, part in parts]
        check(max(last_rows, default=0) <= len(given), f"the rows of windows among {len(given)}")
        run = _whole if all(layer.block for layer in layers) else _separate
        results = run(layers, given, [rows[id(mask)] for mask in masks], cache, output_hidden_states)
        last = stack.norm(results[-1].view(states.shape))
        kept = last[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else last[:, logits_to_keep]
        inner = [result.view(states.shape) for result in results[:-1]]
        return _Output(own.lm_head(kept), [states, *inner, last] if output_hidden_states else [])


@lru_cache(maxsize=8)
def _fused(kind: Any) -> Any:
    """A subclass of models of this class, so that lookups by class still find them."""
    return type(f"Fused{kind.__name__}", (_Model, kind), {})


def _whole(
    layers: Sequence[_Layer], given: Tensor, rows: Sequence[_Parts], cache: CacheAdapter, keep: bool
) -> list[Tensor]:
    """Run layers by one call.

    Args:
        given: inputs of the first, [n, hidden size].
        rows: for each layer.
        keep: all results are needed, not only the last.

    Returns:
        The results, each [n, hidden size].
    """
    first, count, dtype = layers[0], len(layers), given.dtype
    attended = first.heads * first.size
    joined = attended + 2 * first.shared * first.size
    zeros = given.new_zeros((len(given), attended))  # for rows of no window
    many, hidden = len(given), len(first.before)
    sizes = hidden, joined, 2 * first.inner, first.inner
    room = [given.new_empty((many, size)) for size in sizes]
    state, product, both, inner = (
        pointer(*own) for own in zip(room, [dtype] * 4, [many] * 4, sizes, strict=True)
    )
    out, read = pointer(zeros, dtype, many, attended), pointer(given, dtype, many, hidden)
    results = [torch.empty_like(given) for _ in range(count if keep else 2)]
    places = [pointer(result, dtype, many, hidden) for result in results]
    heads = [
        own
        for layer, parts in zip(layers, rows, strict=True)
        for own in _heads(layer, parts, cache, given, product, out)
    ]
    structs = [own.pointer for parts in rows for _, _, own in parts]
    _check_memory(
        _functions(given).layers(
            count,
            (POINTER(BlockStruct) * count)(*(layer.block for layer in layers)),
            byref(RoomStruct(state=state, joined=product, attended=out, both=both, inner=inner)),
            many,
            read,
            (ctypes.c_void_p * count)(*(places[place % len(places)] for place in range(count))),
            len(rows[0]),
            (POINTER(RowsStruct) * len(structs))(*structs),
            (HeadsStruct * len(heads))(*heads),
        )
    )
    return [results[place % len(results)] for place in range(count)]


def _separate(
    layers: Sequence[_Layer], given: Tensor, rows: Sequence[_Parts], cache: CacheAdapter, keep: bool
) -> list[Tensor]:
    """Run layers one by one, with products of any kernels; arguments and results are those of ``_whole``."""
    found, results, dtype = _functions(given), [], given.dtype
    for layer, parts in zip(layers, rows, strict=True):
        joined, output, gates, down = layer.products
        count, size, epsilon = len(given), len(layer.before), layer.epsilon
        state, result = torch.empty_like(given), torch.empty_like(given)
        place, room, out = (pointer(own, dtype, count, size) for own in (state, given, result))
        before, between = (pointer(own, dtype, size) for own in (layer.before, layer.between))
        found.norm(count, size, room, None, before, epsilon, None, place)
        product = joined(state)
        queries = layer.heads * layer.size
        attended = given.new_zeros((count, queries))  # for rows of no window
        width = queries + 2 * layer.shared * layer.size
        places = pointer(product, dtype, count, width), pointer(attended, dtype, count, queries)
        heads = _heads(layer, parts, cache, given, *places)
        for (_, _, own), one in zip(parts, heads, strict=True):
            _check_memory(found.attention(own.pointer, byref(one)))
        added = output(attended)
        found.norm(count, size, room, pointer(added, dtype, count, size), between, epsilon, out, place)
        both = gates(state)
        inner = both.new_empty((count, layer.inner))
        gate = pointer(both, dtype, count, 2 * layer.inner)
        up = gate + layer.inner * both.element_size()
        found.gated(count, layer.inner, gate, up, 2 * layer.inner, pointer(inner, dtype, count, layer.inner))
        given = result.add_(down(inner))
        results.append(given)
    return results


def _functions(given: Tensor) -> Any:
    """The compiled functions for these rows, which exist if a model was fused."""
    return functions(given.dtype)


def _heads(
    layer: _Layer, parts: _Parts, cache: CacheAdapter, given: Tensor, product: int, attended: int
) -> list[HeadsStruct]:
    """The addresses of a layer's queries, keys, values, cache and results of attention, per window.

    Args:
        product, attended: addresses of [n, queries, keys and values] and [n, heads * size].
    """
    queries, keys, item = layer.heads * layer.size, layer.shared * layer.size, given.element_size()
    stride, dtype = queries + 2 * keys, given.dtype
    query_norm, key_norm = (
        pointer_or_null(own, dtype, layer.size) for own in (layer.query_norm, layer.key_norm)
    )
    found = []
    for start, window, rows in parts:
        cached = cache.buffers(layer.place, window)
        query = product + start * stride * item
        key = query + queries * item
        shape, strides = (rows.sequences, layer.shared, rows.columns, layer.size), cached[0].stride()[:2]
        keys_of, values_of = (rows_pointer(own, dtype, shape, strides) for own in cached)
        found.append(
            HeadsStruct(
                query=query,
                key=key,
                value=key + keys * item,
                query_stride=stride,
                key_stride=stride,
                value_stride=stride,
                query_norm=query_norm,
                key_norm=key_norm,
                epsilon=layer.epsilon,
                scale=layer.scale,
                keys=keys_of,
                values=values_of,
                sequence_stride=strides[0],
                head_stride=strides[1],
                out=attended + start * queries * item,
            )
        )
    return found


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("attention found no memory for its workspace")


def _rows_of(
    layer: _Layer, mask: Tensor | None, cache: CacheAdapter, rotation: tuple[Tensor, Tensor]
) -> _Parts:
    """The rows of a forward's windows."""
    found, window = _functions(rotation[0]), cache.window
    if isinstance(window, Window):
        return [(0, window, _Rows(layer, found, mask, None, window, rotation))]
    assert mask is not None
    rows = []
    for part in parts_in(mask, cache.shared):
        own = rotation[0][:, part.span], rotation[1][:, part.span]
        found_rows = _Rows(layer, found, part.mask, part.cells, part.window, own)
        rows.append((part.span.start, part.window, found_rows))
    return rows


class _Rows:
    """The rows of a window and the columns that each attends to, as ``native/layers.c`` reads them.

    Args:
        mask: boolean [B, 1, width, columns], of rows in a line too; None or without columns if each row
            attends to all before it.
        line: places of the rows in the window, if they are in a line and not all of it.
        rotation: cosines and sines of the rows' positions, each [B or 1, width, size].

    Attributes:
        count: number of rows.
        sequences, columns: numbers of the cache's sequences, and of their rows, that are read or written.
    """

    def __init__(
        self,
        layer: _Layer,
        found: Any,
        mask: Tensor | None,
        line: Tensor | None,
        window: Window,
        rotation: tuple[Tensor, Tensor],
    ) -> None:
        batch, width = len(window.slots), window.width
        if line is None:
            cells = np.arange(batch * width)
        else:
            cells = line.numpy()
            check(0 <= cells.min(initial=0) <= cells.max(initial=0) < batch * width, f"{batch * width} cells")
        grid = np.full((batch, width), -1, dtype=np.int32)
        for row, offset, own in zip(grid, window.offsets, window.widths, strict=True):
            row[:own] = np.arange(offset, offset + own)
        place = np.ascontiguousarray(grid.reshape(-1)[cells])
        sequence = (cells // width).astype(np.int32)
        order = np.argsort(sequence, kind="stable").astype(np.int32)
        begin = np.searchsorted(sequence[order], np.arange(batch + 1)).astype(np.int32)
        count = len(cells)
        size = layer.size
        *per_row, columns = _columns(found, mask, cells, place, grid.size)
        first, run, counts, start = per_row
        self._arrays = [order, begin, sequence, place, *per_row, columns]  # whose addresses the struct has
        grid_shape = (batch, width, size) if line is None else (1, count, size)
        self._rotation = [one.expand(grid_shape).reshape(count, size) for one in rotation]
        self._queries = torch.empty(count, layer.heads, size)
        self.count, self.sequences = count, batch
        self.columns = max(window.columns, 0 if mask is None else mask.shape[-1])
        cosine, sine = (pointer(own, layer.before.dtype, count, size) for own in self._rotation)
        struct = RowsStruct(
            rows=count,
            sequences=batch,
            heads=layer.heads,
            shared=layer.shared,
            size=size,
            order=address(order, _INT, count),
            begin=address(begin, _INT, batch + 1),
            sequence=address(sequence, _INT, count),
            place=address(place, _INT, count),
            first=address(first, _INT, count),
            run=address(run, _INT, count),
            count=address(counts, _INT, count),
            start=address(start, _INT, count),
            columns=address(columns, _INT, len(columns)),
            cosine=cosine,
            sine=sine,
            queries=pointer(self._queries, torch.float32, count, layer.heads, size),
        )
        self.pointer = ctypes.pointer(struct)


def _columns(found: Any, mask: Tensor | None, cells: Any, place: Any, grid: int) -> list[Any]:
    """The arrays ``first``, ``run``, ``count``, ``start`` and ``columns`` of ``struct rows``.

    Args:
        cells: the rows' places in the window, below ``grid``.
    """
    rows = len(cells)
    if mask is None or not mask.shape[-1]:
        zeros, run = np.zeros(rows, dtype=np.int32), place + 1  # none for padding
        return [zeros, run, run, zeros, zeros]
    if mask.dtype != torch.bool:
        raise OutpaceError(f"a fused layer takes boolean masks, not {mask.dtype}")
    seen, (batch, _, width, columns) = mask.contiguous(), mask.shape
    at = cells.astype(np.int32)
    check(grid <= batch * width, f"a mask of {grid} rows")
    first, run, count, start = np.empty((4, rows), dtype=np.int32)
    arrays = (address(own, _INT, rows) for own in (at, place, first, run, count, start))
    given = (pointer(seen, torch.bool, batch, 1, width, columns), rows, columns, *arrays)
    listed = np.empty(max(found.read_mask(*given, None), 1), dtype=np.int32)
    found.read_mask(*given, address(listed, _INT, len(listed)))
    return [first, run, count, start, listed]


# The rows of each window of a forward, after the number of rows before them.
_Parts = list[tuple[int, Window, _Rows]]
