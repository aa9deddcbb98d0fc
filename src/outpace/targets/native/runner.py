"""The native runner: a forward of a batch of sequences by one call into C."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from huggingface_hub.utils.tqdm import tqdm
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import KVCache, Window
from outpace.cache.lanes import Lane
from outpace.native.forward import (
    HELD_BYTES,
    PER_ROW,
    BatchStruct,
    DecoderStruct,
    ForwardRoomStruct,
    LaneStruct,
    LayerStruct,
    NormStruct,
    ProductStruct,
    ViewStruct,
)
from outpace.native.layers import byref, functions
from outpace.native.pointers import address, addresses, check, pointer, pointer_or_null, rows_pointer
from outpace.targets.batch import Batch, IntArray
from outpace.targets.cpu.quants import QuantEmbedding
from outpace.targets.native.fitting import recipe_of
from outpace.targets.native.weights import Angles, Product, Weights, views_of
from outpace.targets.rows import Output

_INT = np.dtype(np.int32)


class NativeRunner:
    """A decoder computed in C. It knows nothing of transformers' modules once it is made, but the rotary one.

    Args:
        model: a transformers model of which ``why_not_native`` says None.
        context: maximum number of positions; None for no limit.
        quantise: "int8" or "int4" to round its weights.

    Attributes:
        weights: what it computes with.
        layers: their numbers in the model.
        products: of each layer, four; then the head's.
    """

    def __init__(self, model: Any, context: int | None, quantise: str = "") -> None:
        recipe = recipe_of(model)
        assert recipe is not None
        self.weights, self._context, self._recipe = Weights(model, recipe, quantise), context, recipe
        self.products: Sequence[Product] = self.weights.products
        self._held_head: Any = None
        weights, config = self.weights, self.weights.config
        self.layers = list(range(config.num_hidden_layers))
        each = views_of(recipe, config)
        self._views = list(dict.fromkeys(each))
        self._window = (0, 0)
        rotary = weights.base.rotary_emb
        weights.held.append(rotary)  # for its buffers
        made = {view.kind: Angles(rotary, weights.dtype, view.kind, recipe.repeated) for view in self._views}
        self._angles = [made[view.kind] for view in self._views]
        # On a terminal, and of a model that takes this many seconds; never in a file of messages.
        bar: Any = tqdm
        shown = bar(each, "packing weights", delay=2, disable=None, leave=False)
        self._layers = [weights.layer(layer, self._views.index(view)) for layer, view in enumerate(shown)]
        last = "norm" if hasattr(weights.base, "norm") else "final_layer_norm"
        self._norm = weights.norm(weights.base, last, weights.hidden)
        head, self._table, self._factor = model.get_output_embeddings(), weights.table(), weights.factor()
        self._embedded = len(model.get_input_embeddings().weight)
        self.vocabulary = int(head.out_features)
        self._head = weights.product([head], weights.hidden, self.vocabulary, head=True)
        self._cap = float(getattr(config, "final_logit_softcapping", None) or 0)
        self._logit = recipe.logit
        self._begin()
        self._library: Any = functions(weights.dtype)

    def _begin(self) -> None:
        """Start without what is kept between forwards."""
        self._lanes: WeakKeyDictionary[Any, _Buffers] = WeakKeyDictionary()
        self._struct: tuple[DecoderStruct, int] | None = None  # with the number of positions that it has

    def some_layers(self, layers: Sequence[int], bare: bool) -> NativeRunner:
        """The same with a subset of the layers; with ``bare``, without norm and head."""
        part = copy.copy(self)
        part._layers = [self._layers[layer] for layer in layers]
        part.layers = [self.layers[layer] for layer in layers]
        part._begin()
        if bare:
            part._norm, part._head, part._logit, part._cap = NormStruct(), ProductStruct(), 1.0, 0.0
            part.vocabulary = self.weights.hidden
        return part

    def over_window(self, sinks: int, recent: int) -> NativeRunner:
        """The same, attending to the first and the most recent committed rows alone."""
        part = copy.copy(self)
        part._window = (sinks, recent)
        part._begin()
        return part

    def with_products(self, products: Sequence[Product]) -> NativeRunner:
        """The same with other weights in its products, which are those of all layers, then the head's."""
        part = copy.copy(self)
        part._begin()
        part.products = products  # whose addresses the structs have
        *of_layers, head = (product.packed.product(product.bias) for product in products)
        part._layers, part._head = [], head
        for number, layer in enumerate(self._layers):
            struct = LayerStruct.from_buffer_copy(layer)
            struct.joined, struct.output, struct.gates, struct.down = of_layers[4 * number : 4 * number + 4]
            part._layers.append(struct)
        return part

    def with_head(self, head: ProductStruct, held: Any) -> NativeRunner:
        """The same with another head, whose outputs may be other tokens.

        Args:
            held: the owner of the memory whose addresses the struct has.
        """
        part = copy.copy(self)
        part._begin()
        part._head, part.vocabulary, part._held_head = head, int(head.outputs), held
        return part

    @torch.inference_mode()
    def run(
        self,
        cache: KVCache,
        batch: Batch,
        cache_layers: Mapping[int, int],
        hidden: Sequence[int] = (),
        inputs: Tensor | None = None,
    ) -> Output:
        """Compute a batch.

        Args:
            cache_layers: layer of the model -> layer of the cache.
            hidden: layers whose states are wanted, as in ``Output``.
            inputs: of the first layer, [N, hidden size], instead of the tokens' embeddings.

        Raises:
            OutpaceError: a token has no embedding.
        """
        windows = cache.begin(batch.width_by_slot)
        batch, moved = batch.select([slot for window in windows for slot in window.slots])
        weights, dtype, rows = self.weights, self.weights.dtype, len(batch.tokens)
        batch.check()
        if inputs is None:
            known = self._embedded
            check(0 <= batch.tokens.min(initial=0) <= batch.tokens.max(initial=0) < known, "known tokens")
        past = np.array([cache.length(slot) for slot in batch.slots], dtype=_INT)
        decoder = byref(self._decoder(int((past + batch.widths).max(initial=1))))
        if inputs is not None and moved is not None:
            inputs = inputs[torch.from_numpy(moved)]
        if inputs is None and isinstance(self._table, QuantEmbedding):
            inputs = self._table(torch.from_numpy(batch.tokens))
        states = None if inputs is None else (inputs * self._recipe.embedding).contiguous()
        made, kept = self._batch(batch, past, windows, cache_layers, states)
        every = len(self._layers) + 1
        results = [
            torch.empty(rows, weights.hidden, dtype=dtype) for _ in range(every if hidden else min(every, 3))
        ]
        # Without states to keep, each layer but the first writes over what the one before it read.
        outputs = [results[0], *(results[1 + layer % (len(results) - 1)] for layer in range(every - 1))]
        outputs = results if hidden else outputs
        width = self._head.outputs or weights.hidden
        logits = torch.empty(len(batch.read), width, dtype=dtype)
        normed = torch.empty(rows, weights.hidden, dtype=dtype) if hidden else None
        room, more = self._room(rows, len(batch.slots), len(batch.read), self._library.listed(decoder, made))
        pointers = addresses([pointer(each, dtype, rows, weights.hidden) for each in outputs])
        room.states = address(pointers, np.uint64, every)
        room.normed = pointer_or_null(normed, dtype, rows, weights.hidden)
        room.logits = pointer(logits, dtype, len(batch.read), width)
        if self._library.forward(decoder, made, byref(room)):
            raise MemoryError("a forward found no memory for its workspace")
        del kept, more
        found = {layer: _state(outputs, normed, layer) for layer in hidden}
        return batch.output(logits if len(batch.read) else None, found)

    def _decoder(self, positions: int) -> DecoderStruct:
        """The struct of the model, with angles for at least this number of positions."""
        known = self._struct
        if known is not None and positions <= known[1]:
            return known[0]
        sinks, recent = self._window
        views, counts, tables = [], [], []
        for view, angles in zip(self._views, self._angles, strict=True):
            cosine, sine = angles.upto(positions, self._context)
            count, rotary = cosine.shape
            counts.append(count)
            views.append(
                ViewStruct(
                    window=view.window,
                    sinks=sinks,
                    recent=recent,
                    rotary=rotary if view.rotates else 0,
                    interleaved=self._recipe.interleaved,
                    cosine=pointer(cosine, self.weights.dtype, count, rotary),
                    sine=pointer(sine, self.weights.dtype, count, rotary),
                )
            )
            tables += [cosine, sine]
        layers = (LayerStruct * len(self._layers))(*self._layers)
        for number, layer in enumerate(layers):
            layer.cached = number
        struct = DecoderStruct(
            layers=len(layers),
            views=len(views),
            hidden=self.weights.hidden,
            layer=layers,
            view=(ViewStruct * len(views))(*views),
            embeddings=None
            if isinstance(self._table, QuantEmbedding)
            else pointer(self._table, self.weights.dtype, *self._table.shape),
            embedding=self._factor,
            norm=self._norm,
            head=self._head,
            logit=self._logit,
            cap=self._cap,
        )
        struct.tables = tables  # whose addresses it has, in any thread that uses it
        self._struct = struct, min(counts)
        return struct

    def _batch(
        self,
        batch: Batch,
        past: IntArray,
        windows: Sequence[Window],
        cache_layers: Mapping[int, int],
        states: Tensor | None,
    ) -> tuple[Any, list[Any]]:
        """The struct of a batch, and what has to live as long."""
        seats = {
            slot: (window.start + i) for window in windows for i, slot in enumerate(window.slots) if slot
        }
        seat = np.array([seats[slot] for slot in batch.slots], dtype=_INT)
        order = [cache_layers[layer] for layer in self.layers]
        kept: list[Any] = [seat]
        lanes, start = [], 0
        for window in windows:
            fed = sum(1 for width in window.widths if width)
            buffers = self._lanes.get(window.lane.memory)
            if buffers is None:
                buffers = self._lanes[window.lane.memory] = _Buffers(self, window.lane, order)
            lanes.append(buffers.lane(start, start + fed))
            kept.append(buffers)
            start += fed
        sequences = len(batch.slots)
        arrays = {
            "begin": (batch.starts, sequences + 1),
            "seat": (seat, sequences),
            "past": (past, sequences),
            "fed": (batch.fed, sequences),
            "parents": (batch.parents, len(batch.parents)),
            "tokens": (batch.tokens, len(batch.tokens)),
            "rows": (batch.read, len(batch.read)),
        }
        struct = BatchStruct(
            sequences=sequences,
            lanes=len(lanes),
            read=len(batch.read),
            lane=(LaneStruct * len(lanes))(*lanes),
            inputs=pointer_or_null(states, self.weights.dtype, len(batch.tokens), self.weights.hidden),
            **{name: address(array, _INT, count) for name, (array, count) in arrays.items()},
        )
        return byref(struct), [*kept, batch, past, states]

    def _room(self, rows: int, sequences: int, read: int, listed: int) -> tuple[ForwardRoomStruct, list[Any]]:
        """Workspace of a forward, and its memory."""
        weights, dtype = self.weights, self.weights.dtype
        queries, keys = weights.heads * weights.size, weights.shared * weights.size
        sizes = {
            "state": weights.hidden,
            "added": weights.hidden,
            "joined": queries + 2 * keys,
            "attended": queries,
            "both": weights.inner * (1 + self._recipe.gated),
            "inner": weights.inner,
        }
        parts = {name: torch.empty(rows, size, dtype=dtype) for name, size in sizes.items()}
        parts["picked"] = torch.empty(max(read, 1), weights.hidden, dtype=dtype)
        numbers = np.empty(len(self._views) * PER_ROW * rows + max(listed, 1), dtype=_INT)
        held = np.empty(HELD_BYTES * sequences, dtype=np.uint8)
        asked = torch.empty(rows, queries, dtype=torch.float32)
        at = address(numbers, _INT, len(numbers))
        room = ForwardRoomStruct(
            queries=pointer(asked, torch.float32, rows, queries),
            numbers=at,
            columns=at + len(self._views) * PER_ROW * rows * _INT.itemsize,
            held=address(held, np.uint8, len(held)),
            **{name: pointer(part, dtype, *part.shape) for name, part in parts.items()},
        )
        return room, [parts, numbers, held, asked]


def _state(outputs: Sequence[Tensor], normed: Tensor | None, layer: int) -> Tensor:
    """Hidden states of a layer, numbered as in ``Output``; the last ones are after the norm."""
    assert normed is not None
    return normed if layer in (-1, len(outputs) - 1) else outputs[layer]


class _Buffers:
    """Addresses of the keys and values of a lane, as long as its memory stays."""

    def __init__(self, runner: NativeRunner, lane: Lane, order: Sequence[int]) -> None:
        weights = runner.weights
        shape = lane.places, weights.shared, lane.room + 1, weights.size
        both = lane.by_layer(slice(None), slice(None))
        strides = [both[layer][0].stride()[:2] for layer in order]
        pointers = [
            rows_pointer(tensor, weights.dtype, shape, own)
            for layer, own in zip(order, strides, strict=True)
            for tensor in both[layer]
        ]
        self._count, self._addresses = len(order), addresses(pointers)
        self._strides: NDArray[np.int64] = np.ascontiguousarray(np.array(strides, dtype=np.int64).T)

    def lane(self, start: int, stop: int) -> LaneStruct:
        """The struct of sequences ``start`` .. ``stop - 1`` of a batch."""
        strides = address(self._strides, np.int64, 2, self._count)
        return LaneStruct(
            first=start,
            end=stop,
            buffers=address(self._addresses, np.uint64, 2 * self._count),
            sequence_stride=strides,
            head_stride=strides + self._count * self._strides.itemsize,
        )
