"""Linear layers with packed weights on a CPU, for forwards of a few rows.

A stock ``nn.Linear`` passes its weights to a kernel in their layout in memory, in every forward. On a CPU a
packed layout is read faster, and several rows cost little more than one. The weights are the same numbers, to
the last bit; only the order of summation differs from the stock layer's, and for a row it does not depend on
the number of rows (``row_step``).
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel
from outpace.targets.checks import family, untouchable
from outpace.targets.hardware import free_bytes

_TRIED = (2048, 1024)  # outputs and inputs of the layers of a trial: larger than a processor's nearest cache
_LAYERS = 4
_ROWS = (1, 4, 8)
_VERSION = attrgetter("_version")
_SHARE = 0.5  # share of the free memory that copies of weights may use by default
_WINS = 0.9  # a kernel is chosen if it needs at most this share of the stock layer's time
# The same against an earlier one of KERNELS: the choice between two similarly fast ones must not depend on
# chance, since their bits differ.
_WINS_CLEARLY = 0.7
_OUTPUTS = 64  # of the layers that rows are tried on


class Kernel(ABC):
    """A kernel that multiplies rows by the weights of a linear layer.

    Attributes:
        name: name in reports.
        dtypes: supported dtypes of weights.
        least: minimum number of weights of a layer for which its call overhead pays.
        copies: it keeps a copy of the weights.
        wide: its rows are float32 for any dtype of the weights.
    """

    name: ClassVar[str]
    dtypes: ClassVar[frozenset[torch.dtype]]
    least: ClassVar[int] = 1
    copies: ClassVar[bool] = True
    wide: ClassVar[bool] = False

    @abstractmethod
    def pack(self, weight: Tensor) -> Any:
        """Pack weights, [outputs, inputs], for ``multiply``; return None if they would be rounded.

        Raises:
            RuntimeError: this processor, or this torch, does not support it.
        """

    @abstractmethod
    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        """Multiply rows [n, inputs] -> [n, outputs], in the dtype of the rows."""


class Stock(Kernel):
    """The stock layer's kernel, without packing."""

    name = "as it is"
    dtypes = frozenset((torch.float32, torch.bfloat16, torch.float16))
    copies = False

    def pack(self, weight: Tensor) -> Any:
        return weight

    def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(rows, packed, bias)


class OneDNN(Kernel):
    """oneDNN's layout for a few rows. In bfloat16 for processors with instructions for it."""

    name = "oneDNN"
    dtypes = frozenset((torch.float32, torch.bfloat16))
    least = 1 << 18  # a call costs about 20 us more than the stock layer's

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
    least = 1 << 16
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


KERNELS: tuple[Kernel, ...] = (Stock(), OneDNN(), HalfFBGEMM())


class Linear(nn.Module):
    """A linear layer that uses a kernel, with the rows padded to a multiple of ``step``.

    Args:
        single: unpacked weight for a single row; None to use the kernel for it too.
    """

    def __init__(
        self, linear: nn.Linear, kernel: Kernel, packed: Any, step: int, single: Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kernel = kernel
        self.step = step
        self.packed = packed
        self.bias = linear.bias
        self._single = single
        self.train(linear.training)

    def forward(self, states: Tensor) -> Tensor:
        rows = states.reshape(-1, self.in_features)
        count = len(rows)
        if count == 1 and self._single is not None:
            return nn.functional.linear(states, self._single, self.bias)
        missing = -count % self.step
        if missing:
            rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
        product = self.kernel.multiply(rows, self.packed, self.bias)
        return product[:count].view(*states.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, kernel={self.kernel.name}"


@lru_cache(maxsize=64)
def row_step(kernel: Kernel, dtype: torch.dtype, inputs: int, outputs: int = _OUTPUTS) -> int:
    """The smallest step such that any multiple of it gives a row the same bits, for any other rows.

    Kernels treat the last one or two rows of a forward differently, or split the sum of a single row with
    many inputs. The step is found by trial; layers of more than 64 outputs behave as those of 64.

    Raises:
        UnsupportedModel: no step tried has this property.
    """
    weight, rows = _cancelling(inputs, outputs)
    weight, rows = weight.to(dtype), rows.to(torch.float32 if kernel.wide else dtype)
    packed = kernel.pack(weight)
    expected = torch.cat([kernel.multiply(part, packed, None) for part in rows.split(24)])
    for step in (1, 2, 3, 4, 6, 8, 12, 24):
        counts = dict.fromkeys(
            [*range(step, 38, step), *(count // step * step for count in (62, 80, 127, 144))]
        )
        if all(
            torch.equal(kernel.multiply(rows[:count].contiguous(), packed, None), expected[:count])
            for count in counts
        ):
            return step
    raise UnsupportedModel(f"{kernel.name}: a row's bits depend on the other rows in every shape tried")


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
        found: kernel's name -> its time relative to the stock layer's, or why it is not available.
    """

    kernel: Kernel
    single: bool
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
        if dtype in kernel.dtypes:
            try:
                calls[kernel] = _call(kernel, weights)
                calls[kernel](inputs[0])
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                calls.pop(kernel, None)
                found[kernel.name] = f"not to be had here: {str(error).splitlines()[0]}"
    seconds = _race(calls, inputs)
    total = {kernel: sum(each) for kernel, each in seconds.items()}
    stock = best = KERNELS[0]
    for kernel, one in total.items():
        if one <= total[best] * (_WINS if best is stock else _WINS_CLEARLY):
            best = kernel
        found[kernel.name] = f"{one / total[stock]:.2f} of the stock layer's time"
    return Trial(best, seconds[stock][0] < seconds[best][0], found)


def _call(kernel: Kernel, weights: Sequence[Tensor]) -> Callable[[Tensor], Any]:
    packed = [kernel.pack(weight) for weight in weights]
    return lambda rows: [kernel.multiply(rows, one, None) for one in packed]


def _race(
    calls: Mapping[Kernel, Callable[[Tensor], Any]], inputs: Sequence[Tensor]
) -> dict[Kernel, list[float]]:
    """Seconds of each kernel for each input, the best of five interleaved rounds."""
    # With one thread, measure processor time, which excludes other programs.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = {(kernel, place): math.inf for kernel in calls for place in range(len(inputs))}
    for _ in range(5):
        for kernel, place in best:
            began = clock()
            calls[kernel](inputs[place])
            best[kernel, place] = min(best[kernel, place], clock() - began)
    return {kernel: [best[kernel, place] for place in range(len(inputs))] for kernel in calls}


class Packer:
    """Replacement of a model's linear layers by packed ones.

    Args:
        pack: pack weights if this is faster on this machine.
        exact: pad rows to the ``row_step`` that makes them bit-exact, in layers that are not packed too.

    Attributes:
        kernels: name of a kernel -> number of layers that use it.
        packed: weights that were packed.
    """

    def __init__(self, model: Any, pack: bool, exact: bool) -> None:
        self._layers = set(_linears(model))
        self._pack = pack
        self._exact = exact
        self.kernels: Counter[str] = Counter()
        self.packed: list[Tensor] = []

    def __call__(self, module: nn.Module) -> nn.Module | None:
        """The replacement of a module; None to keep it."""
        if type(module) is not nn.Linear or module not in self._layers:
            return None
        weight = module.weight.detach()
        kernel, single = KERNELS[0], False
        if self._pack:
            best = best_kernel(weight.dtype, torch.get_num_threads())
            if weight.numel() >= best.kernel.least:
                kernel, single = best.kernel, best.single and not self._exact
        packed = kernel.pack(weight)
        if packed is None:  # this kernel would round them
            kernel, packed = KERNELS[0], weight
        size = module.in_features, min(module.out_features, _OUTPUTS)
        step = row_step(kernel, weight.dtype, *size) if self._exact else 1
        if kernel.copies:
            self.kernels[kernel.name] += 1
            self.packed.append(module.weight)
        elif step == 1:
            return None
        return Linear(module, kernel, packed, step, weight if single else None)


def packing_wanted(model: Any, pack: bool | Literal["auto"]) -> bool:
    """Decide whether to pack a model.

    Raises:
        UnsupportedModel: ``pack`` is True, but the model cannot be packed.
    """
    if pack is False:
        return False
    why = untouchable(model) or _none_to_pack(model)
    if pack is True and why:
        raise UnsupportedModel(f"{family(model)} cannot be packed: {why}; leave pack out")
    if why or pack is True:
        return not why
    free = free_bytes(torch.device("cpu"))
    return free is None or sum(layer.weight.nbytes for layer in _linears(model)) <= free * _SHARE


def _linears(model: Any) -> list[nn.Linear]:
    """Layers that a kernel may replace: no subclasses, such as quantised layers, and none with hooks."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.dtype in KERNELS[0].dtypes and not _has_hooks(module)
    ]


def unproven(step: nn.Module) -> str:
    """The first module for which a row's bits are not known to be independent of the other rows.

    They are for linear layers (``row_step``) and for embeddings, which only look up. For others, such as
    experts that multiply the rows routed to them, they are not; the bit test may pass them by chance, because
    rounding to a half dtype hides nearly all effects of the order of a sum.

    Returns:
        Its name and the reason; empty if there is none.
    """
    known = set(_linears(step))
    for name, module in step.named_modules():
        if not isinstance(module, Linear | nn.Embedding) and module not in known:
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(weight.dim() > 1 for weight in own):
                return f"{name} ({type(module).__name__}) multiplies rows in a way of its own"
    return ""


def _none_to_pack(model: Any) -> str:
    """The reason why none of a model's layers would be packed; empty if some would."""
    layers = _linears(model)
    if not layers:
        return "it has no plain linear layers in float32, bfloat16 or float16"
    dtype = layers[0].weight.dtype
    largest = max(layer.weight.numel() for layer in layers)
    if all(largest < kernel.least for kernel in KERNELS if kernel.copies and dtype in kernel.dtypes):
        return "its layers are too small to gain from it"
    trial = best_kernel(dtype, torch.get_num_threads())
    if largest >= trial.kernel.least and trial.kernel.copies:
        return ""
    return "; ".join(f"{name}: {what}" for name, what in trial.found.items())


def _has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[name] for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))


def tail_step(model: Any) -> int:
    """Number of rows whose activations fill a whole number of the processor's vectors.

    torch computes the last elements of a tensor one by one if they do not fill a vector, and some functions
    (SiLU, GELU, sigmoid, softplus) then round differently.
    """
    wide = torch.backends.cpu.get_cpu_capability() == "AVX2"
    elements = 2 * (32 if wide else 64) // model.dtype.itemsize  # two vectors at a time
    head = model.get_output_embeddings()
    sizes = {m.out_features for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    return max((elements // math.gcd(elements, size) for size in sizes if size >= elements), default=1)


class Weights:
    """Detector of weights modified since they were packed."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        # Tensors made in inference mode do not count writes.
        self._weights = [weight for weight in weights if not weight.is_inference()]
        self._versions = self._now()

    def _now(self) -> int:
        return sum(map(_VERSION, self._weights))

    @property
    def changed(self) -> bool:
        return self._now() != self._versions


def written(model: Any) -> int:
    """A number that increases when a weight of a model is modified in place."""
    return sum(weight._version for weight in model.parameters() if not weight.is_inference())
