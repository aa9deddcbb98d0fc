"""The roof: the least time that a step can take on this machine, beside the measured time by width.

A step moves every weight once and the keys and values of what came before, and multiplies each weight with
each of its rows. It takes at least as long as the memory needs for the former, or the processor for the
latter (the roofline of Williams, Waterman and Patterson 2009). Both limits are measured here, not read from a
data sheet: reading a buffer as large as the weights, so that a model that fits a cache is held to the speed
of that cache, and a product of large matrices, in the model's dtype or in float32, whichever is faster. They
are the best that was seen with torch's own operations and as many threads as it has; a machine may do more.
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
from outpace.targets.base import Rows, TargetModel

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
_ROUNDS = 7
_LEAST_BUFFER = 1 << 20
# Hardly any cache is as large: a larger buffer comes from memory as this one does, and is read no faster. It
# would take room that a large model does not leave.
_MOST_BUFFER = 1 << 30
_COLUMNS = 1024
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS = "no roof is known for experts: a step reads those that its tokens choose"


@dataclass(frozen=True)
class Work:
    """Least work of a step.

    Attributes:
        weight_bytes: of all weights that a step reads.
        row_bytes: of the keys and values of one row of the cache, all layers.
        weight_numbers: numbers that each row is multiplied with.
        attention_numbers: of the keys and values of one row: a row is multiplied with these per row it sees.
    """

    weight_bytes: int
    row_bytes: int
    weight_numbers: int
    attention_numbers: int

    def bytes(self, batch: float, context: float) -> float:
        """Bytes that a step over ``batch`` sequences moves, each with ``context`` rows in the cache."""
        return self.weight_bytes + batch * context * self.row_bytes

    def operations(self, rows: float, context: float) -> float:
        """Multiplications and additions of a step over a total of ``rows`` rows."""
        return 2 * rows * (self.weight_numbers + context * self.attention_numbers)


@dataclass(frozen=True)
class Limits:
    """Measured limits of the machine: bytes per second over a buffer of that size, operations per second."""

    bandwidth: float
    buffer_bytes: int
    operations: float

    def seconds(self, moved: float, operations: float) -> float:
        """The least time for this work."""
        return max(moved / self.bandwidth, operations / self.operations)


@dataclass(frozen=True)
class Width:
    """A forward of one sequence over ``rows`` rows: median seconds, and the least, None if unknown."""

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
    """Compute the least work of a target's step.

    The input embeddings are looked up, not read, except where the head shares them.

    Raises:
        OutpaceError: the target is no transformers model, or one whose steps do not read all weights
            (experts).
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
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        row_bytes=cache.row_bytes,
        weight_numbers=sum(weight.numel() for weight in matrices),
        attention_numbers=_attended(config, [kind.heads * kind.size for kind in kinds]),
    )


def _model_of(target: TargetModel) -> Any:
    model = target.model
    if model is None:
        raise OutpaceError(f"no roof is known for a {type(target).__name__}")
    return model


def _has_experts(model: Any) -> bool:
    config = model.config.get_text_config(decoder=True)
    return any(getattr(config, name, None) for name in _EXPERTS)


def _attended(config: Any, rows: list[int]) -> int:
    """Count keys and values once per head of the queries that shares them."""
    heads = getattr(config, "num_attention_heads", 1)
    shared = getattr(config, "num_key_value_heads", None) or heads
    return sum(rows) * max(1, heads // shared)


def measure_roof(target: TargetModel, context: int, device: str, dtype: torch.dtype) -> Roof:
    """Measure the machine and the model's step by width; ``context`` rows are in the cache.

    Raises:
        OutpaceError: the target is no transformers model.
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
    """Measure the machine's limits: the best of several rounds, since a disturbance only makes one slower.

    Args:
        buffer_bytes: to be read, within 1 MiB and 1 GiB.
        dtype: the model's.
    """
    size = min(max(buffer_bytes, _LEAST_BUFFER), _MOST_BUFFER)
    cuda = torch.device(device).type == "cuda"
    # In float32 whatever the model's dtype: reading is what counts, and some dtypes are slow to multiply.
    matrix = torch.ones(size // 4 // _COLUMNS, _COLUMNS, device=device)
    vector = torch.ones(_COLUMNS, device=device)
    side = 8192 if cuda else 1024
    # A processor without instructions for a smaller dtype multiplies in float32 what is stored in it: float32
    # sets its limit there.
    kinds = {dtype} if dtype == torch.float64 else {dtype, torch.float32}
    squares = [torch.ones(side, side, dtype=kind, device=device) for kind in kinds]
    with torch.inference_mode():
        # Some libraries multiply by a vector with one thread; a sum takes all of them.
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

    All widths are measured in turns.

    Args:
        before: called before each forward; what it raises ends the measurement.
    """
    cache = target.new_cache(batch, context + max(widths))
    slots = [target.open(cache) for _ in range(batch)]
    target.forward(cache, dict.fromkeys(slots, Rows([0] * context)), logits_from=None)
    cache.keep(dict.fromkeys(slots, range(context)))
    device = str(next(target.model.parameters()).device)

    def step(rows: int) -> float:
        before()
        began = time.perf_counter()
        target.forward(cache, dict.fromkeys(slots, Rows([0] * rows)))
        wait(device)
        took = time.perf_counter() - began
        cache.keep({})
        return took

    found: list[list[float]] = [[step(rows) for rows in widths] for _ in range(_ROUNDS + 1)][1:]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def _rounds(work: Callable[[], object], device: str) -> list[float]:
    """Time each round, after one that warms up."""
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
