"""Trials of kernels on this machine: which is fastest, and in which numbers of rows each is exact."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel, first_line
from outpace.native.layers import SHARE, functions
from outpace.native.pool import Pool, follow_torch, pool
from outpace.native.processors import Threads, usual_threads
from outpace.targets.cpu.kernels import COMPILED, KERNELS, QUANTISED, STOCK, Compiled, Rounded
from outpace.targets.cpu.layouts import Blocks
from outpace.targets.kernel import Kernel

# Outputs of the layers that rows are tried on: of kernels that sum all outputs alike, and of the others.
_TRIED_ALIKE, _TRIED_OUTPUTS = 64, 576
_TRIED_THREADS = (1, 2, 3, 4)  # and torch's number
# Errors of a kernel that this processor, or this torch, does not support.
UNAVAILABLE = (RuntimeError, AttributeError, NotImplementedError)
K = TypeVar("K")
_CPU = torch.device("cpu")
_TRIED = (2048, 1024)  # outputs and inputs of the layers of a trial: larger than a processor's nearest cache
_LAYERS = 4
_ROUNDS = 5
_LOSES = 1.2  # a number of threads is not taken if it needs this share of the time that fewer need


def row_step(
    kernel: Kernel,
    dtype: torch.dtype,
    inputs: int,
    outputs: int = _TRIED_ALIKE,
    device: torch.device = _CPU,
) -> int:
    """The smallest step such that any multiple of it gives a row the same bits, for any other rows.

    And for any number of threads, on a CPU: most kernels of libraries split the sums of some shapes among
    threads, or treat the rows of each thread as another forward.

    Kernels treat the last one or two rows of a forward differently, or split the sum of a single row with
    many inputs. The step is found by trial, of at most a few hundred of the outputs.

    Raises:
        UnsupportedModel: no step tried has this property.
    """
    most = _TRIED_ALIKE if kernel.alike else _TRIED_OUTPUTS
    # With as many left over after whole tiles, which some kernels compute in another way.
    tried = outputs if outputs <= most else most + (0 if kernel.alike else outputs % 64)
    threads = (1,) if device.type != "cpu" else (*_TRIED_THREADS, torch.get_num_threads())
    return _row_step(kernel, dtype, inputs, tried, device, tuple(dict.fromkeys(threads)))


@cache
def _row_step(
    kernel: Kernel,
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    device: torch.device,
    threads: tuple[int, ...],
) -> int:
    """``row_step`` for a number of outputs, by trials with these numbers of threads."""
    weight, rows = _cancelling(inputs, outputs, SHARE if kernel.rounds else 1)
    if kernel.rounds:
        # Weights that it holds exactly, or the products would not cancel. Such products have few bits, so
        # their sums are rounded only if they differ much in size.
        weight, rows = weight.sign() * 7.5, rows.pow(7)
    weight, rows = weight.to(device, dtype), rows.to(device, torch.float32 if kernel.wide else dtype)
    packed = kernel.pack(weight)
    with using_threads(threads[0]):
        expected = torch.cat([kernel.multiply(part, packed, None) for part in rows.split(24)])
    for step in (1, 2, 3, 4, 6, 8, 12, 24):
        counts = dict.fromkeys(
            [*range(step, 38, step), *(count // step * step for count in (62, 80, 127, 144))]
        )
        if all(_same(kernel, packed, rows, expected, counts, count) for count in threads):
            return step
    raise UnsupportedModel(
        f"{kernel.name}: a row's bits depend on the other rows, or on the number of threads, in every shape "
        "tried"
    )


def _same(
    kernel: Kernel, packed: Any, rows: Tensor, expected: Tensor, counts: Iterable[int], threads: int
) -> bool:
    """True if the first rows give the expected products, for each of these numbers of rows."""
    with using_threads(threads):
        return all(
            torch.equal(kernel.multiply(rows[:count].contiguous(), packed, None), expected[:count])
            for count in counts
        )


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Run torch, and functions in C, with a number of threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        follow_torch()
        yield
    finally:
        torch.set_num_threads(before)
        follow_torch()


@lru_cache(maxsize=1)
def settled_threads() -> Threads:
    """Let steps use fewer threads than there are cores, if more make products slower: the number, and why.

    A short trial, whose result is kept. Other programs that are busy meanwhile may slow any number, so only
    one that is clearly slower is not taken.
    """
    shared, usual = pool(), usual_threads()
    if isinstance(shared, str):
        return Threads(torch.get_num_threads(), f"torch's, since there are no functions in C: {shared}")
    if usual.forced:
        return usual
    count = int(shared.library.pool_usual_threads())
    if count < usual.number:
        usual = Threads(count, "torch's number")
    if count == 1 or isinstance(functions(torch.float32), str):
        return usual
    seconds = _seconds_of_threads(shared, count)
    best = not_slower(seconds)
    shared.library.pool_usual(best)
    if best == count:
        share = seconds[count] / seconds[1]
        return Threads(count, f"{usual.because}; products take {share:.2f} of one thread's time")
    return Threads(best, f"with {count} products take {seconds[count] / seconds[best]:.2f} of the time")


def not_slower(seconds: Mapping[int, float]) -> int:
    """The largest number of threads that is not clearly slower than a smaller one."""
    return max(n for n in seconds if seconds[n] <= _LOSES * min(seconds[m] for m in seconds if m <= n))


def _seconds_of_threads(shared: Pool, most: int) -> dict[int, float]:
    """Seconds of a few products with some numbers of threads, the best of interleaved rounds."""
    weights = [torch.ones(*_TRIED) for _ in range(_LAYERS)]
    run, rows = _call(Compiled(), weights), torch.ones(1, _TRIED[1])
    seconds = dict.fromkeys(sorted({most >> halved for halved in range(most.bit_length())}), math.inf)
    for _ in range(_ROUNDS):
        for number in seconds:
            shared.library.pool_wish(number)
            began = time.perf_counter()
            run(rows)
            seconds[number] = min(seconds[number], time.perf_counter() - began)
    follow_torch()
    return seconds


def _cancelling(inputs: int, outputs: int, share: int = 1) -> tuple[Tensor, Tensor]:
    """Weights [outputs, inputs] and rows [144, inputs] whose products are 0 except for rounding.

    Every product of a weight and a row's element also occurs with the opposite sign in the sum. So only the
    rounding of the sums remains, which reveals any other order of summation, even if the result is rounded to
    a half dtype, which hides nearly all differences between ordinary sums.

    Args:
        share: inputs that are rounded together, which stay together, so that the opposite is rounded alike.
    """
    generator, half = torch.Generator().manual_seed(0), inputs // (2 * share) * share
    order = torch.arange(half).view(-1, share)[torch.randperm(half // share, generator=generator)].flatten()
    weight, rows = (torch.randn(count, half, generator=generator) for count in (outputs, 144))
    odd = (0, inputs - 2 * half)
    return (
        nn.functional.pad(torch.cat([weight, -weight[:, order]], dim=1), odd),
        nn.functional.pad(torch.cat([rows, rows[:, order]], dim=1), odd),
    )


@cache
def chosen_kernel(dtype: torch.dtype) -> Kernel:
    """The kernel of packed weights in a dtype that this machine has, the compiled one before others.

    The stock layer's, without packing, where there is none. Nothing is timed, so a model has the same bits in
    every process: wherever both ran, the compiled products took less time (docs/measurements/steps.md).
    """
    packing = (one for one in KERNELS if one.copies and dtype in one.dtypes)
    return next((one for one in packing if why_unavailable(one, dtype) is None), STOCK)


class Products(NamedTuple):
    """Seconds of products of one row.

    Attributes:
        call: of a call, whatever its weights.
        rounded: bits -> seconds per rounded weight.
    """

    call: float
    rounded: dict[int, float]


@lru_cache(maxsize=8)
def products_of_a_row(dtype: torch.dtype, threads: int) -> Products:
    """Measure compiled products of a row in a dtype that has them; the result is cached.

    Args:
        threads: torch's number of threads, part of the cache's key.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*_TRIED, generator=generator).to(dtype) for _ in range(_LAYERS)]
    calls: dict[int, Callable[[Tensor], Any]] = {}
    for kernel in QUANTISED.values():
        assert isinstance(kernel, Rounded)
        packed = [Blocks.pack([weight], kernel.bits)._replace(dtype=dtype) for weight in weights]
        calls[kernel.bits] = partial(_multiply_all, kernel, packed)
    calls[0] = _call(COMPILED, [weight[:1] for weight in weights])
    found = _race(calls, [torch.randn(1, _TRIED[1], generator=generator).to(dtype)])
    [call] = found.pop(0)
    numbers = _LAYERS * math.prod(_TRIED)
    return Products(call / _LAYERS, {bits: seconds[0] / numbers for bits, seconds in found.items()})


def why_unavailable(kernel: Kernel, dtype: torch.dtype) -> str | None:
    """The reason why this machine does not run a kernel for a dtype; None if it does, or is not for it."""
    if dtype not in kernel.dtypes:
        return None
    try:
        kernel.multiply(torch.ones(1, 64, dtype=dtype), kernel.pack(torch.ones(64, 64, dtype=dtype)), None)
    except UNAVAILABLE as error:
        return first_line(error)
    return None


def _call(kernel: Kernel, weights: Sequence[Tensor]) -> Callable[[Tensor], Any]:
    return partial(_multiply_all, kernel, [kernel.pack(weight) for weight in weights])


def _multiply_all(kernel: Kernel, packed: Sequence[Any], rows: Tensor) -> None:
    for weight in packed:
        kernel.multiply(rows, weight, None)


def clock() -> float:
    """Seconds: with one thread, of the processor, which excludes other programs."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _race(calls: Mapping[K, Callable[[Tensor], Any]], inputs: Sequence[Tensor]) -> dict[K, list[float]]:
    """Seconds of each kernel for each input, the best of five interleaved rounds."""
    # Kernels in turn, so that each finds its weights in the same caches, for any input.
    best = {(kernel, number): math.inf for number in range(len(inputs)) for kernel in calls}
    for _ in range(_ROUNDS):
        for kernel, number in best:
            began = clock()
            calls[kernel](inputs[number])
            best[kernel, number] = min(best[kernel, number], clock() - began)
    return {kernel: [best[kernel, number] for number in range(len(inputs))] for kernel in calls}
