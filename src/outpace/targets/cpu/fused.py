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
from collections.abc import Callable, Sequence
from ctypes import POINTER
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.cache import Window
from outpace.core import OutpaceError
from outpace.native.layers import BlockStruct, HeadsStruct, RoomStruct, RowsStruct, byref, functions
from outpace.native.pointers import check, pointer
from outpace.targets.cpu.fused_layer import Layer, layer_of
from outpace.targets.cpu.fused_rows import RowsByWindow, heads_of, rows_of
from outpace.targets.cpu.fusible import GROUPS
from outpace.targets.cpu.linear import Norm, Rounded
from outpace.targets.inputs.config import CACHE
from outpace.targets.inputs.forward import CacheAdapter
from outpace.targets.inputs.line import Line
from outpace.targets.inputs.surgery import stack_of

_FUSED = "_outpace_layer"  # where a module keeps its ``Layer``

Join = Callable[[Sequence[nn.Linear | Rounded]], nn.Module]


def fuse_layers(model: Any, step: Any, join: Join) -> None:
    """Fuse the layers of a model's copy.

    Args:
        model: a model of which ``fusing_refused`` is empty.
        step: its copy (``exchange``), with the linear layers in ``fused_linears`` as they are.
        join: makes one linear layer of several with the same inputs.
    """
    stack = stack_of(step)
    for original, layer in zip(stack_of(model).layers, stack.layers, strict=True):
        products = []
        for part, names in GROUPS:
            linears = [getattr(getattr(original, part), name) for name in names]
            whole, start = join(linears), 0
            for name, linear in zip(names, linears, strict=True):
                stop = start + linear.out_features
                setattr(
                    getattr(layer, part), name, _JoinedOutputs(whole, start, stop) if linears[1:] else whole
                )
                start = stop
            products.append(whole)
        vars(layer)[_FUSED] = layer_of(layer, products)
    sizes = {vars(layer)[_FUSED].sizes for layer in stack.layers}
    check(len(sizes) == 1, f"layers of the same sizes, not {sizes}")
    norm = stack.norm
    stack.norm = Norm(norm.weight, norm.variance_epsilon)
    kind: Any = type(step)
    step.__class__ = _fused(kind)


def fuse_anew(step: Any) -> None:
    """Fuse the layers of a copy of a fused step anew, whose linear layers were replaced; others stay."""
    if not isinstance(step, _Model):
        return
    for layer in stack_of(step).layers:
        firsts = [getattr(getattr(layer, part), names[0]) for part, names in GROUPS]
        vars(layer)[_FUSED] = layer_of(layer, [getattr(first, "whole", first) for first in firsts])


class _JoinedOutputs(nn.Module):
    """Some outputs of linear layers that were joined, for the layer's own forward."""

    def __init__(self, whole: nn.Module, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self.start, self.stop = whole, start, stop

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor = self.whole(states)
        return product[..., self.start : self.stop]


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
        model: Any = self
        stack = getattr(model, model.base_model_prefix)
        states: Tensor = stack.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        masks = [attention_mask] * len(stack.layers)
        if isinstance(attention_mask, dict):
            masks = [attention_mask[kind] for kind in stack.config.layer_types]
        rotation = stack.rotary_emb(states, position_ids=position_ids)
        layers: list[Layer] = [vars(layer)[_FUSED] for layer in stack.layers]
        if states.dtype != layers[0].before.dtype:  # the functions would read past the end of the weights
            raise OutpaceError(
                f"the rows are {states.dtype}, but this target was made for {layers[0].before.dtype}; make a "
                "new target after converting a model"
            )
        inputs = states.reshape(-1, states.shape[-1]).contiguous()
        by_mask = {id(mask): mask for mask in masks}
        rows = {key: rows_of(layers[0], mask, cache, rotation) for key, mask in by_mask.items()}
        last_rows = [start + part.count for parts in rows.values() for start, _, part in parts]
        check(max(last_rows, default=0) <= len(inputs), f"the rows of windows among {len(inputs)}")
        run = _whole if all(layer.block for layer in layers) else _separate
        results = run(layers, inputs, [rows[id(mask)] for mask in masks], cache, output_hidden_states)
        last = stack.norm(results[-1].view(states.shape))
        kept = last[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else last[:, logits_to_keep]
        inner = [result.view(states.shape) for result in results[:-1]]
        return _Output(model.lm_head(kept), [states, *inner, last] if output_hidden_states else [])


@lru_cache(maxsize=8)
def _fused(kind: Any) -> Any:
    """A subclass of models of this class, so that lookups by class still find them."""
    return type(f"Fused{kind.__name__}", (_Model, kind), {})


def _whole(
    layers: Sequence[Layer], inputs: Tensor, rows: Sequence[RowsByWindow], cache: CacheAdapter, keep: bool
) -> list[Tensor]:
    """Run layers by one call.

    Args:
        inputs: of the first, [n, hidden size].
        rows: for each layer.
        keep: all results are needed, not only the last.

    Returns:
        The results, each [n, hidden size].
    """
    first, count, dtype = layers[0], len(layers), inputs.dtype
    attended = first.heads * first.size
    joined = attended + 2 * first.shared * first.size
    zeros = inputs.new_zeros((len(inputs), attended))  # for rows of no window
    many, hidden = len(inputs), len(first.before)
    sizes = hidden, joined, 2 * first.inner, first.inner
    room = [inputs.new_empty((many, size)) for size in sizes]
    state, product, both, inner = (
        pointer(tensor, dtype, many, size) for tensor, size in zip(room, sizes, strict=True)
    )
    out, read = pointer(zeros, dtype, many, attended), pointer(inputs, dtype, many, hidden)
    results = [torch.empty_like(inputs) for _ in range(count if keep else 2)]
    outputs = [pointer(result, dtype, many, hidden) for result in results]
    heads = [
        struct
        for layer, parts in zip(layers, rows, strict=True)
        for struct in heads_of(layer, parts, cache, inputs, product, out)
    ]
    structs = [of_window.pointer for parts in rows for _, _, of_window in parts]
    library: Any = functions(dtype)
    _check_memory(
        library.layers(
            count,
            (POINTER(BlockStruct) * count)(*(layer.block for layer in layers)),
            byref(RoomStruct(state=state, joined=product, attended=out, both=both, inner=inner)),
            many,
            read,
            (ctypes.c_void_p * count)(*(outputs[layer % len(outputs)] for layer in range(count))),
            len(rows[0]),
            (POINTER(RowsStruct) * len(structs))(*structs),
            (HeadsStruct * len(heads))(*heads),
        )
    )
    return [results[layer % len(results)] for layer in range(count)]


def _separate(
    layers: Sequence[Layer], inputs: Tensor, rows: Sequence[RowsByWindow], cache: CacheAdapter, keep: bool
) -> list[Tensor]:
    """Run layers one by one, with products of any kernels; arguments and results are those of ``_whole``."""
    library: Any = functions(inputs.dtype)
    results, dtype = [], inputs.dtype
    for layer, parts in zip(layers, rows, strict=True):
        joined, output, gates, down = layer.products
        count, size, epsilon = len(inputs), len(layer.before), layer.epsilon
        state, result = torch.empty_like(inputs), torch.empty_like(inputs)
        normed, room, out = (pointer(tensor, dtype, count, size) for tensor in (state, inputs, result))
        before, between = (pointer(norm, dtype, size) for norm in (layer.before, layer.between))
        library.norm(count, size, room, None, before, epsilon, None, normed)
        product = joined(state)
        queries = layer.heads * layer.size
        attended = inputs.new_zeros((count, queries))  # for rows of no window
        width = queries + 2 * layer.shared * layer.size
        addresses = pointer(product, dtype, count, width), pointer(attended, dtype, count, queries)
        heads = heads_of(layer, parts, cache, inputs, *addresses)
        for (_, _, of_window), struct in zip(parts, heads, strict=True):
            _check_memory(library.attention(of_window.pointer, byref(struct)))
        added = output(attended)
        library.norm(count, size, room, pointer(added, dtype, count, size), between, epsilon, out, normed)
        both = gates(state)
        inner = both.new_empty((count, layer.inner))
        gate = pointer(both, dtype, count, 2 * layer.inner)
        up = gate + layer.inner * both.element_size()
        library.gated(
            count, layer.inner, gate, up, 2 * layer.inner, pointer(inner, dtype, count, layer.inner)
        )
        inputs = result.add_(down(inner))
        results.append(inputs)
    return results


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("attention found no memory for its workspace")
