"""The roof: a lower bound of a step's time on this machine, and the measured time by width.

A step reads every weight and all cached keys and values once, and multiplies each weight with each of its
rows. Its time is at least that of the memory for the former and of the processor for the latter (the roofline
of Williams, Waterman and Patterson 2009). Both limits are measured, not read from a data sheet: by reading a
buffer as large as the weights, so that a model that fits into a cache is compared with that cache's speed,
and by a product of large matrices, in the model's dtype or in float32, whichever is faster. They are the best
results of torch's own operations with all of its threads; the machine may be capable of more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outpace.cache import KVCache
from outpace.core import OutpaceError
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.rows import Rows

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
_ROUNDS = 7
_LEAST_BUFFER = 1 << 20
# Larger than nearly all caches: a larger buffer is read at the same speed, but might not fit beside a model.
_MOST_BUFFER = 1 << 30
_COLUMNS = 1024
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS = "no roof is known for experts: a step reads those that its tokens choose"


@dataclass(frozen=True)
class Work:
    """Minimum work of a step.

    Attributes:
        weight_bytes: bytes of all weights that a step reads.
        row_bytes: bytes of the keys and values of one cache row, over all layers.
        weight_numbers: number of weights that each row is multiplied with.
        attention_numbers: number of key and value elements that a row is multiplied with per cached row.
    """

    weight_bytes: int
    row_bytes: int
    weight_numbers: int
    attention_numbers: int

    def bytes(self, batch: float, context: float) -> float:
        """Bytes moved by a step over ``batch`` sequences, each with ``context`` rows in the cache."""
        return self.weight_bytes + batch * context * self.row_bytes

    def operations(self, rows: float, context: float) -> float:
        """Multiplications and additions of a step over a total of ``rows`` rows."""
        return 2 * rows * (self.weight_numbers + context * self.attention_numbers)


@dataclass(frozen=True)
class Limits:
    """Measured limits of the machine: bytes per second for a buffer of this size, operations per second."""

    bandwidth: float
    buffer_bytes: int
    operations: float

    def seconds(self, moved: float, operations: float) -> float:
        """Lower bound of the time for this work."""
        return max(moved / self.bandwidth, operations / self.operations)


@dataclass(frozen=True)
class Width:
    """A forward of one sequence over ``rows`` rows: median seconds, and the lower bound, None if unknown."""

    rows: int
    seconds: float
    least: float | None


@dataclass(frozen=True)
class Roof:
    """Work of a model's step, limits of the machine, and measured steps by width.

    Attributes:
        work: None for a mixture of experts.
        context: rows in the cache in the measured steps.
    """

    work: Work | None
    limits: Limits
    widths: tuple[Width, ...]
    context: int


def work_of(target: TargetModel) -> Work:
    """Compute the minimum work of a target's step.

    The input embeddings are looked up, not read in full, unless the head shares them.

    Raises:
        OutpaceError: the target is not a transformers model, or its steps do not read all weights (experts).
    """
    model = _model_of(target)
    if _has_experts(model):
        raise OutpaceError(EXPERTS)
    config = model.config.get_text_config(decoder=True)
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    weights = [weight for weight in model.parameters() if tied or weight is not table]
    matrices = [weight for weight in weights if weight.dim() > 1]
    cache = target.new_cache(1, 1)
    assert isinstance(cache, KVCache)  # that of a transformers model
    kinds = [kind for one in cache.layers for kind in (one.keys, one.values)]
    return Work(
        weight_bytes=sum(map(_stored, weights)),
        row_bytes=cache.row_bytes,
        weight_numbers=sum(weight.numel() for weight in matrices),
        attention_numbers=_attended(config, [kind.heads * kind.size for kind in kinds]),
    )


def _stored(weight: torch.Tensor) -> int:
    """Bytes of a weight; a quantised one, such as torchao's, consists of other tensors."""
    parts = getattr(weight, "__tensor_flatten__", None)
    return weight.nbytes if parts is None else sum(_stored(getattr(weight, name)) for name in parts()[0])


def _model_of(target: TargetModel) -> Any:
    model = target.model
    if model is None:
        raise OutpaceError(f"no roof is known for a {type(target).__name__}")
    return model


def _has_experts(model: Any) -> bool:
    config = model.config.get_text_config(decoder=True)
    return any(getattr(config, name, None) for name in _EXPERTS)


def _attended(config: Any, rows: list[int]) -> int:
    """Number of key and value elements of a row, counted once per query head that shares them."""
    heads = getattr(config, "num_attention_heads", 1)
    shared = getattr(config, "num_key_value_heads", None) or heads
    return sum(rows) * max(1, heads // shared)


def measure_roof(target: TargetModel, context: int, device: str, dtype: torch.dtype) -> Roof:
    """Measure the machine and the model's step by width, with ``context`` rows in the cache.

    Raises:
        OutpaceError: the target is not a transformers model.
    """
    model = _model_of(target)
    work = None if _has_experts(model) else work_of(target)
    weights = sum(weight.nbytes for weight in model.parameters()) if work is None else work.weight_bytes
    limits = measure_limits(weights, device, dtype)
    room = 2 * max(WIDTHS) if target.context is None else target.context
    context = max(1, min(context, room - max(WIDTHS)))
    widths = tuple(width for width in WIDTHS if target.context is None or context + width <= target.context)
    seconds = measure_widths(target, context, widths)
    found = tuple(
        Width(rows, took, None if work is None else _least(work, limits, rows, context))
        for rows, took in zip(widths, seconds, strict=True)
    )
    return Roof(work, limits, found, context)


def _least(work: Work, limits: Limits, rows: int, context: int) -> float:
    return limits.seconds(work.bytes(1, context), work.operations(rows, context))


def measure_limits(buffer_bytes: int, device: str, dtype: torch.dtype) -> Limits:
    """Measure the machine's limits: the best of several rounds, since disturbances only slow them down.

    Args:
        buffer_bytes: bytes of the buffer to read, limited to between 1 MiB and 1 GiB.
        dtype: the model's.
    """
    size = min(max(buffer_bytes, _LEAST_BUFFER), _MOST_BUFFER)
    cuda = torch.device(device).type == "cuda"
    # In float32, since only reading matters here, and some dtypes are slow to multiply.
    matrix = torch.ones(size // 4 // _COLUMNS, _COLUMNS, device=device)
    vector = torch.ones(_COLUMNS, device=device)
    side = 8192 if cuda else 1024
    # A processor without instructions for a smaller dtype computes in float32, which is then the limit.
    kinds = {dtype} if dtype == torch.float64 else {dtype, torch.float32}
    squares = [torch.ones(side, side, dtype=kind, device=device) for kind in kinds]
    with torch.inference_mode():
        # Some libraries multiply by a vector with one thread; a sum uses all of them.
        readings = (partial(torch.mv, matrix, vector), partial(torch.sum, matrix))
        reading = min(min(_rounds(read, device)) for read in readings)
        multiplying = min(min(_rounds(partial(torch.mm, square, square), device)) for square in squares)
    return Limits(matrix.nbytes / reading, matrix.nbytes, 2 * side**3 / multiplying)


def measure_widths(
    target: TargetModel,
    context: int,
    widths: tuple[int, ...],
    batch: int = 1,
    before: Callable[[], None] = lambda: None,
) -> list[float]:
    """Measure the median seconds of a forward by its rows per sequence, for ``batch`` sequences.

    The widths are interleaved.

    Args:
        before: called before each forward; an exception it raises ends the measurement.
    """
    cache = target.new_cache(batch, context + max(widths))
    slots = [target.open(cache) for _ in range(batch)]
    target.forward(cache, Batch.of(dict.fromkeys(slots, Rows([0] * context)), None))
    cache.keep(dict.fromkeys(slots, range(context)))
    device = str(target.device)

    def step(rows: int) -> float:
        before()
        began = time.perf_counter()
        target.forward(cache, Batch.of(dict.fromkeys(slots, Rows([0] * rows))))
        wait(device)
        took = time.perf_counter() - began
        cache.keep({})
        return took

    found: list[list[float]] = [[step(rows) for rows in widths] for _ in range(_ROUNDS + 1)][1:]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def _rounds(work: Callable[[], object], device: str) -> list[float]:
    """Time each round, after a warm-up round."""
    found = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        work()
        wait(device)
        found.append(time.perf_counter() - began)
    return found[1:]


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
