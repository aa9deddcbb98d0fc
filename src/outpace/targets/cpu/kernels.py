"""Kernels of linear layers on a CPU: which is fastest here, and in which numbers of rows each is exact.

Trials on this machine answer both questions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel, first_line
from outpace.native.layers import DTYPES, ProductStruct, byref, functions
from outpace.native.pointers import pointer, pointer_or_null
from outpace.targets.kernel import Kernel, Stock

# Outputs of the layers that rows are tried on: of kernels that sum all outputs alike, and of the others.
_TRIED_ALIKE, _TRIED_OUTPUTS = 64, 576
_TRIED_THREADS = (1, 2, 3, 4)  # and torch's number
# Errors of a kernel that this processor, or this torch, does not support.
UNAVAILABLE = (RuntimeError, AttributeError, NotImplementedError)
_CPU = torch.device("cpu")
_TRIED = (2048, 1024)  # outputs and inputs of the layers of a trial: larger than a processor's nearest cache
_LAYERS = 4
_ROWS = (1, 4, 8)
_WINS = 0.9  # a kernel is chosen if it needs at most this share of the stock layer's time
# The same against an earlier one of KERNELS: the choice between two similarly fast ones must not depend on
# chance, since their bits differ.
_WINS_CLEARLY = 0.7


class Panels(NamedTuple):
    """Weights as ``native/layers.c`` reads them.

    Attributes:
        panel: outputs of a panel.
        pair: inputs of a pair.
        weights: [panels, pairs of inputs, panel, pair], padded with zeros.
        scales: of the padded outputs, float32, if the weights are int8.
    """

    inputs: int
    outputs: int
    panel: int
    pair: int
    weights: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, found: Any, weight: Tensor, scales: Tensor | None = None) -> Panels:
        """Weights, [outputs, inputs], and their scales, [outputs].

        Args:
            found: the functions for the dtype of the rows.
        """
        (outputs, inputs), panel, pair = weight.shape, found.panel_outputs(), found.pair_inputs()
        missing = -outputs % panel
        whole = nn.functional.pad(weight, (0, -inputs % pair, 0, missing))
        packed = whole.view(-1, panel, whole.shape[1] // pair, pair).transpose(1, 2).contiguous()
        padded = None if scales is None else nn.functional.pad(scales, (0, missing))
        return cls(inputs, outputs, panel, pair, packed, padded)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows and biases: that of the weights, or bfloat16 if these are int8."""
        return self.weights.dtype if self.scales is None else torch.bfloat16

    def product(self, bias: Tensor | None) -> ProductStruct:
        panels, pairs = -(-self.outputs // self.panel), -(-self.inputs // self.pair)
        dtype = self.dtype if self.scales is None else torch.int8
        return ProductStruct(
            inputs=self.inputs,
            outputs=self.outputs,
            weights=pointer(self.weights, dtype, panels, pairs, self.panel, self.pair),
            bias=pointer_or_null(bias, self.dtype, self.outputs),
            scales=pointer_or_null(self.scales, torch.float32, panels * self.panel),
        )

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply rows [n, inputs] -> [n, outputs]."""
        given, out = rows.contiguous(), rows.new_empty((len(rows), self.outputs))
        count, dtype = len(rows), self.dtype
        found: Any = functions(dtype)
        found.multiply(
            byref(self.product(bias)),
            count,
            pointer(given, dtype, count, self.inputs),
            pointer(out, dtype, count, self.outputs),
        )
        return out


class Compiled(Kernel):
    """Products of ``native/layers.c``, in its layout for a few rows."""

    name = "compiled"
    dtypes = DTYPES
    alike = True
    # A call costs 5 us more than the stock layer's.
    least: ClassVar = {torch.float32: 1 << 14, torch.bfloat16: 1 << 12}

    def pack(self, weight: Tensor) -> Any:
        found = functions(weight.dtype)
        if isinstance(found, str):
            raise RuntimeError(found)
        return Panels.of(found, weight)

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if rows.dtype != packed.weights.dtype:  # the function would read past the end of the weights
            raise RuntimeError(f"a layer packed in {packed.weights.dtype} got rows in {rows.dtype}")
        product: Tensor = packed.multiply(rows, bias)
        return product

    def product(self, packed: Any, bias: Tensor | None) -> ProductStruct | None:
        found: ProductStruct = packed.product(bias)
        return found


class OneDNN(Kernel):
    """oneDNN's layout for a few rows. In bfloat16 for processors with instructions for it."""

    name = "oneDNN"
    dtypes = frozenset((torch.float32, torch.bfloat16))
    # A call costs about 20 us more than the stock layer's in float32, and as much in bfloat16.
    least: ClassVar = {torch.float32: 1 << 17, torch.bfloat16: 1 << 14}

    def pack(self, weight: Tensor) -> Any:
        return torch.ops.mkldnn._reorder_linear_weight.default(weight, 8)

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
        return product


class HalfFBGEMM(Kernel):
    """FBGEMM's float16 weights with rows in float32: exact products, and half the bytes of float32.

    bfloat16 has 8 significant bits and float16 has 11, so bfloat16 weights fit except for their range. The
    weights of each output are multiplied by a power of two that brings the small ones into float16's range,
    and the products by its inverse.
    """

    name = "FBGEMM float16"
    dtypes = frozenset((torch.bfloat16, torch.float16))
    least: ClassVar = {torch.bfloat16: 1 << 16, torch.float16: 1 << 16}
    wide = True

    def pack(self, weight: Tensor) -> Any:
        wide = weight.float()
        # Below 2^15, since float16's maximum is 65504; float16 weights fit without scaling.
        exponents = 15 - torch.frexp(wide.abs().amax(dim=1)).exponent
        if weight.dtype == torch.float16:
            exponents.zero_()
        lift = torch.ldexp(torch.ones(len(wide)), exponents)[:, None]
        lifted = wide * lift
        if not torch.equal(lifted.half().float(), lifted):
            return None
        return torch.ops.quantized.linear_prepack_fp16.default(lifted, None), 1 / lift[:, 0]

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        weight, scale = packed
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(rows.float(), weight)
        product *= scale
        if bias is not None:
            product += bias
        return product.to(rows.dtype)


class Int8(Kernel):
    """int8 weights with a scale per output, rows in bfloat16: products of ``layers.c``, otherwise aten's."""

    name = "int8"
    dtypes = frozenset((torch.bfloat16,))
    rounds = True
    _step = 16  # aten's kernel reads beyond a row if its inputs are not a multiple of this

    def pack(self, weight: Tensor) -> Any:
        # Rounded before it is used, so that an all-zero output does not divide by zero either.
        scale = (weight.float().abs().amax(dim=1) / 127).clamp(min=1e-30).bfloat16()
        numbers = (weight.float() / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        found = functions(torch.bfloat16)
        panels = None if isinstance(found, str) else Panels.of(found, numbers, scale.float())
        return panels or (nn.functional.pad(numbers, (0, -weight.shape[1] % self._step)), scale)

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if isinstance(packed, Panels):
            if rows.dtype != torch.bfloat16:
                raise RuntimeError(f"a layer with int8 weights takes rows in bfloat16, not {rows.dtype}")
            return packed.multiply(rows, bias)
        if missing := -rows.shape[1] % self._step:
            rows = nn.functional.pad(rows, (0, missing))
        product: Tensor = torch.ops.aten._weight_int8pack_mm.default(rows, *packed)
        return product if bias is None else product.add_(bias)

    def product(self, packed: Any, bias: Tensor | None) -> ProductStruct | None:
        return packed.product(bias) if isinstance(packed, Panels) else None


class Int4(Kernel):
    """aten's int4 weights: a scale and a zero per output and 32 inputs, rows in bfloat16."""

    name = "int4"
    dtypes = frozenset((torch.bfloat16,))
    rounds = True
    _group = 32  # inputs

    def pack(self, weight: Tensor) -> Any:
        outputs, inputs = weight.shape
        if inputs % self._group or outputs % 16:
            return None
        groups = weight.float().view(outputs, -1, self._group)
        low = groups.amin(dim=-1, keepdim=True)
        # The kernel's weight is (number - 8) * scale + zero; both are rounded before the numbers are chosen.
        scale = ((groups.amax(dim=-1, keepdim=True) - low) / 15).clamp_(min=1e-30).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()
        numbers = ((groups - zero.float()) / scale.float() + 8).round_().clamp_(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(
            numbers.view(outputs, inputs).int(), 1
        )
        return packed, torch.cat([scale, zero], dim=-1).transpose(0, 1).contiguous()

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        numbers, scales = packed
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            rows, numbers, self._group, scales
        )
        return product if bias is None else product.add_(bias)


STOCK, COMPILED = Stock(), Compiled()
KERNELS: tuple[Kernel, ...] = (STOCK, COMPILED, OneDNN(), HalfFBGEMM())
QUANTISED: dict[str, Kernel] = {kernel.name: kernel for kernel in (Int8(), Int4())}


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


@lru_cache(maxsize=64)
def _row_step(
    kernel: Kernel,
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    device: torch.device,
    threads: tuple[int, ...],
) -> int:
    """``row_step`` for a number of outputs, by trials with these numbers of threads."""
    weight, rows = _cancelling(inputs, outputs)
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
    """Run torch with a number of threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def _cancelling(inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Weights [outputs, inputs] and rows [144, inputs] whose products are 0 except for rounding.

    Every product of a weight and a row's element also occurs with the opposite sign in the sum. So only the
    rounding of the sums remains, which reveals any other order of summation, even if the result is rounded to
    a half dtype, which hides nearly all differences between ordinary sums.
    """
    generator, half = torch.Generator().manual_seed(0), inputs // 2
    order = torch.randperm(half, generator=generator)
    weight, rows = (torch.randn(count, half, generator=generator) for count in (outputs, 144))
    odd = (0, inputs % 2)
    return (
        nn.functional.pad(torch.cat([weight, -weight[:, order]], dim=1), odd),
        nn.functional.pad(torch.cat([rows, rows[:, order]], dim=1), odd),
    )


class Trial(NamedTuple):
    """The fastest kernel for a dtype on this machine.

    Attributes:
        kernel: the fastest one by the total time of forwards of few rows.
        single: the stock layer is faster than it for a single row.
        rows: 4 if it is faster for 4 rows than for one, otherwise 1.
        found: kernel's name -> its time relative to the stock layer's, or why it is not available.
    """

    kernel: Kernel
    single: bool
    rows: int
    found: dict[str, str]


@lru_cache(maxsize=8)
def best_kernel(dtype: torch.dtype, threads: int) -> Trial:
    """Find the fastest kernel for a dtype on this machine by a short trial, whose result is cached.

    Args:
        threads: torch's number of threads, part of the cache's key.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*_TRIED, generator=generator).to(dtype) for _ in range(_LAYERS)]
    inputs = [torch.randn(rows, _TRIED[1], generator=generator).to(dtype) for rows in _ROWS]
    found: dict[str, str] = {}
    calls: dict[Kernel, Callable[[Tensor], Any]] = {}
    for kernel in KERNELS:
        if why := unavailable(kernel, dtype):
            found[kernel.name] = f"not available here: {why}"
        elif dtype in kernel.dtypes:
            calls[kernel] = _call(kernel, weights)
    seconds = _race(calls, inputs)
    total = {kernel: sum(each) for kernel, each in seconds.items()}
    stock = best = KERNELS[0]
    for kernel, own in total.items():
        if own <= total[best] * (_WINS if best is stock else _WINS_CLEARLY):
            best = kernel
        found[kernel.name] = f"{own / total[stock]:.2f} of the stock layer's time"
    one, four, _ = seconds[best]
    return Trial(best, seconds[stock][0] < one, 4 if four <= one * _WINS else 1, found)


def unavailable(kernel: Kernel, dtype: torch.dtype) -> str:
    """The reason why this machine does not run a kernel for a dtype; empty if it does, or is not for it."""
    if dtype not in kernel.dtypes:
        return ""
    try:
        kernel.multiply(torch.ones(1, 64, dtype=dtype), kernel.pack(torch.ones(64, 64, dtype=dtype)), None)
    except UNAVAILABLE as error:
        return first_line(error)
    return ""


def _call(kernel: Kernel, weights: Sequence[Tensor]) -> Callable[[Tensor], Any]:
    packed = [kernel.pack(weight) for weight in weights]
    return lambda rows: [kernel.multiply(rows, one, None) for one in packed]


def _race(
    calls: Mapping[Kernel, Callable[[Tensor], Any]], inputs: Sequence[Tensor]
) -> dict[Kernel, list[float]]:
    """Seconds of each kernel for each input, the best of five interleaved rounds."""
    # With one thread, measure processor time, which excludes other programs.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    # Kernels in turn, so that each finds its weights in the same caches, for any input.
    best = {(kernel, place): math.inf for place in range(len(inputs)) for kernel in calls}
    for _ in range(5):
        for kernel, place in best:
            began = clock()
            calls[kernel](inputs[place])
            best[kernel, place] = min(best[kernel, place], clock() - began)
    return {kernel: [best[kernel, place] for place in range(len(inputs))] for kernel in calls}
