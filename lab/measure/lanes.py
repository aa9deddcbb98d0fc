"""Sequences of different lengths in one forward or in lanes, in memory and in seconds, and packed rows.

    outpace grow --like llama-0.1b --out nano-0.1b
    OMP_NUM_THREADS=1 python lab/measure/lanes.py nano-0.1b

Printed:

1. Memory of the cache for 15 sequences of 512 rows and one of 32,768, all in one lane and in lanes by length.
2. Seconds of a step (median of 7, in turns) of 16 sequences with one row each, some of them longer than the
   others: one forward over all columns of the longest, and one forward per length.
3. Seconds of 16 decoding rows and a chunk of 512 rows of a prompt: in two forwards, and packed, with all rows
   in one line and attention by sequence through a function registered with transformers' AttentionInterface.

Seconds are the thread's processor time, so that other load on the machine matters less.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from outpace.cache import KVCache, LayerShape, Slot
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch
from outpace.targets.inputs.config import CACHE

SHORT = 256
CASES = [(15, 1, times) for times in (2, 4, 8)] + [(8, 8, times) for times in (2, 4, 8)]
ROUNDS = 7


def filled(layers: list[LayerShape], lengths: list[int], spread: float) -> tuple[KVCache, list[Slot]]:
    """A cache with sequences of these lengths, filled with random rows."""
    cache = KVCache(layers, len(lengths), 1, spread=spread)
    slots = [cache.allocate(length + 1) for length in lengths]
    for slot, length in zip(slots, lengths, strict=True):
        buffers = cache._seats[slot].lane.buffers
        shapes = [(buffer.shape[0], buffer.shape[2], length, buffer.shape[4]) for buffer in buffers]
        cache.write_rows(
            slot, [torch.randn(shape, dtype=b.dtype) for shape, b in zip(shapes, buffers, strict=True)]
        )
    return cache, slots


def timed(ways: list[Callable[[], Any]]) -> list[float]:
    """Median seconds of each, in turns, after a warm-up round."""
    found: list[list[float]] = []
    for _ in range(ROUNDS + 1):
        row = []
        for way in ways:
            began = time.thread_time()
            way()
            row.append(time.thread_time() - began)
        found.append(row)
    return [statistics.median(column) for column in zip(*found[1:], strict=True)]


def memory(layers: list[LayerShape]) -> None:
    nowhere = torch.device("meta")
    layers = [
        LayerShape(replace(one.keys, device=nowhere), replace(one.values, device=nowhere)) for one in layers
    ]
    for name, spread in (("one lane", math.inf), ("lanes by length", 4)):
        cache = KVCache(layers, spread=spread)
        for _ in range(15):
            cache.allocate(512)
        cache.allocate(32_768)
        print(f"15 x 512 and 1 x 32768 rows, {name}: {cache.reserved} rows, {cache.bytes / 2**20:.0f} MiB")


def steps(target: CausalTarget) -> None:
    for few, many, times in CASES:
        lengths = [SHORT - 2] * few + [SHORT * times - 2] * many
        ways = []
        for spread in (math.inf, 1):
            cache, slots = filled(target.new_cache().layers, lengths, spread)

            def step(cache: KVCache = cache, slots: list[Slot] = slots) -> None:
                target.forward(cache, Batch.of(dict.fromkeys(slots, Rows([5]))))
                cache.keep({})

            ways.append(step)
        together, apart = timed(ways)
        print(
            f"{few} x {SHORT} and {many} x {SHORT * times} rows: {1e3 * together:.0f} ms in one forward, "
            f"{1e3 * apart:.0f} ms in two"
        )


class Packed:
    """All rows of several sequences in one line, [1, N]; each attends only to its own sequence."""

    def __init__(self, cache: KVCache, widths: dict[Slot, int]) -> None:
        self.lanes = [(cache._seats[slot], width) for slot, width in widths.items()]
        self.layer = 0

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **options: Any) -> Any:
        self.layer, start = layer, 0
        for seat, width in self.lanes:
            at = slice(seat.place, seat.place + 1)
            own = seat.lane.by_layer(at, slice(seat.length, seat.length + width))[layer]
            for target, rows in zip(own, (keys, values), strict=True):
                target.copy_(rows[:, :, start : start + width])
            start += width
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return 0, 0

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        found, start = [], 0
        for seat, width in self.lanes:
            at, end = slice(seat.place, seat.place + 1), seat.length + width
            keys, values = seat.lane.by_layer(at, slice(end))[self.layer]
            mask = None
            if width > 1:
                mask = torch.ones(width, end, dtype=torch.bool).tril(seat.length)
            found.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[:, :, start : start + width], keys, values, mask, scale=scaling, enable_gqa=True
                )
            )
            start += width
        return torch.cat(found, dim=2).transpose(1, 2)


def packed(target: CausalTarget) -> None:
    model: Any = target.model
    layers = target.new_cache().layers
    cache, slots = filled(layers, [SHORT - 2] * 16, 4)
    prompt = cache.allocate(1024)
    cache.write_rows(prompt, cache.read_rows(slots[0], 0, 200))
    decoding, chunk = dict.fromkeys(slots, Rows([5])), Rows([7] * 512)
    current: list[Packed] = []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return current[0].attend(query, options.get("scaling")), None

    AttentionInterface.register("packed", attention)

    def two() -> Tensor:
        logits = target.forward(cache, Batch.of(decoding)).logits
        cache.keep({})
        target.forward(cache, Batch.of({prompt: chunk}, None))
        cache.keep({})
        assert logits is not None
        return logits

    @torch.inference_mode()
    def one() -> Tensor:
        current[:] = [Packed(cache, dict.fromkeys(slots, 1) | {prompt: 512})]
        ids = torch.tensor([[5] * 16 + [7] * 512])
        positions = torch.tensor([[SHORT - 2] * 16 + list(range(200, 712))])
        model.config._attn_implementation = "packed"
        try:
            output = model(
                input_ids=ids, position_ids=positions, **{CACHE: current[0]}, use_cache=True,
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool), logits_to_keep=torch.arange(16),
            )  # fmt: skip
        finally:
            model.config._attn_implementation = "sdpa"
        logits: Tensor = output.logits[0]
        return logits

    torch.testing.assert_close(one(), two(), atol=1e-3, rtol=1e-3)
    line, apart = timed([one, two])
    print(f"16 rows and a chunk of 512: {1e3 * line:.0f} ms packed, {1e3 * apart:.0f} ms in two forwards")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    target = CausalTarget(AutoModelForCausalLM.from_pretrained(sys.argv[1], use_safetensors=True).eval())
    memory(target.new_cache().layers)
    steps(target)
    packed(target)


if __name__ == "__main__":
    main()
