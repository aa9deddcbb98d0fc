"""Linear layers with packed weights on a CPU, for forwards of a few rows.

A stock ``nn.Linear`` passes its weights to a kernel in their layout in memory, in every forward. On a CPU a
packed layout is read faster, and several rows cost little more than one. Unless they are rounded, the weights
are the same numbers, to the last bit; only the order of summation differs from the stock layer's, and for a
row it does not depend on the number of rows (``row_step``).

All layers of a bit-exact step use the products of ``layers.c``, where there is a C compiler: they sum
in the order of the inputs on every processor, and threads share outputs, never a sum. Elsewhere they use a
kernel that a trial shows to give a row the same bits among any rows and with any number of threads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from outpace.core import UnsupportedModel
from outpace.native.forward import NORMS, NormStruct
from outpace.native.layers import LANES, byref, functions
from outpace.native.pointers import check, pointer
from outpace.targets.cpu.kernels import COMPILED, KERNELS, QUANTISED, STOCK, Compiled
from outpace.targets.cpu.trials import UNAVAILABLE, chosen_kernel, row_step
from outpace.targets.inputs.config import is_multimodal
from outpace.targets.inputs.states import convolutions_of, is_adapted, reads_step_weight
from outpace.targets.kernel import Kernel

# Elements that fill two vectors of any processor, and elements that one thread computes: torch shares 2^15.
_VECTORS, _PIECE = 64, 1 << 14
_ACTIVATIONS = frozenset(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())


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
        self._replaced = (linear,)  # not a child, whose weights this does not use
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:
        """The weight of the layer that this replaces, of which some models read the dtype."""
        return self._replaced[0].weight

    def forward(self, states: Tensor) -> Tensor:
        product = self.multiply(states.reshape(-1, self.in_features))
        if self.out_features < _VECTORS and len(product) > 1:
            # With room between rows torch computes functions of each by itself, whatever rows are beside it.
            product = nn.functional.pad(product, (0, 1))[:, :-1]
        return product.view(*states.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor) -> Tensor:
        """Products of rows, [n, inputs] -> [n, outputs]."""
        count = len(rows)
        if count == 1 and self._single is not None:
            return nn.functional.linear(rows, self._single, self.bias)
        if missing := -count % self.step:
            padded = torch.cat([rows, rows[-1:].expand(missing, -1)])
            return self.kernel.multiply(padded, self.packed, self.bias)[:count]
        return self.kernel.multiply(rows, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, kernel={self.kernel.name}"


class Table(nn.Module):
    """Embeddings that are no weights in floats; it looks up, as torch's do."""


class RoundedLinear(Linear):
    """A linear layer of a model whose weights are rounded already, as in its checkpoint.

    Args:
        kernel: for the numbers of ``take``.
    """

    def __init__(self, linear: nn.Linear, kernel: Kernel) -> None:
        super().__init__(linear, kernel, None, 1)

    def take(self, blocks: Any) -> None:
        """Set the weights: ``Blocks``, or others with a tensor of that name."""
        self.packed = blocks
        self.register_buffer("numbers", blocks.weights, persistent=False)


def rounded_of(model: Any) -> list[RoundedLinear]:
    """The layers of a model whose weights are rounded already."""
    return [module for module in model.modules() if isinstance(module, RoundedLinear)]


class CompiledNorm(nn.Module):
    """A root mean square norm by the compiled function, of rows in the dtype of its weight.

    Args:
        weight: of a multiple of ``LANES`` numbers.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        check(not weight.numel() % LANES, f"a multiple of {LANES} weights of a norm, not {weight.numel()}")
        self.weight, self.epsilon = weight, epsilon

    def forward(self, states: Tensor) -> Tensor:
        inputs, out = states.contiguous(), torch.empty_like(states, memory_format=torch.contiguous_format)
        dtype, shape, size = self.weight.dtype, states.shape, self.weight.numel()
        read = pointer(inputs, dtype, *shape[:-1], size)
        wide = self.weight.detach().float()
        struct = NormStruct(
            weight=pointer(wide, torch.float32, size), epsilon=self.epsilon, kind=NORMS["rms"]
        )
        library: Any = functions(dtype)
        library.norm(byref(struct), inputs.numel() // size, size, read, pointer(out, dtype, *shape))
        return out


class Piecewise(nn.Module):
    """An activation whose result for a number depends on no other number, and not on the number of threads.

    torch computes the last elements of each thread's share one by one if they do not fill its vectors, and
    some functions then round differently. So whole vectors are given to it, fewer than it shares.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = (inner,)  # not a child, so that self-tests see one operation on rows

    def forward(self, states: Tensor) -> Tensor:
        flat = states.reshape(-1)
        if missing := -len(flat) % _VECTORS:
            flat = nn.functional.pad(flat, (0, missing))
        [inner], pieces = self._inner, flat.split(_PIECE)
        done = inner(flat) if torch.get_num_threads() == 1 else torch.cat([inner(piece) for piece in pieces])
        return done[: states.numel()].view(states.shape)


def piecewise(module: nn.Module) -> Piecewise | None:
    """The replacement of an activation; None for other modules."""
    return Piecewise(module) if type(module) in _ACTIVATIONS and not list(module.parameters()) else None


class Packer:
    """Replacement of a model's linear layers by packed ones.

    Args:
        pack: pack weights of layers that gain from it, or where ``exact`` needs it.
        exact: give a row the same bits among any rows and with any number of threads, in layers that are not
            packed too.
        quantise: round the weights of all layers; to int8 those of the head, and of shapes that int4 does not
            take.
        kernel: the kernel of all layers; None to choose it.

    Attributes:
        kernels: name of a kernel -> number of layers that use it.
        packed: layers of whose weights a packed copy was made.
        doubled: those among them whose own weights steps do not read.
    """

    def __init__(
        self,
        model: Any,
        pack: bool,
        exact: bool,
        quantise: str = "",
        kernel: Kernel | None = None,
    ) -> None:
        self._layers = {*linears_of(model), *rounded_of(model)}
        self._head = model.get_output_embeddings() if quantise else None
        self._quantise = quantise
        self._pack = pack
        self._exact = exact
        self._kernel = kernel
        self.kernels: Counter[str] = Counter()
        self.packed: list[nn.Linear] = []
        self.doubled: list[nn.Linear] = []

    def __call__(self, module: nn.Module) -> nn.Module | None:
        """The replacement of a module; None to keep it."""
        if module not in self._layers:
            return None
        if isinstance(module, RoundedLinear):
            return self._rounded(module)
        return self._replaced(module) if type(module) is nn.Linear else None

    def _rounded(self, module: RoundedLinear) -> Linear:
        """A layer whose weights are rounded already."""
        kernel, blocks = module.kernel, module.packed
        self.kernels[kernel.name] += 1
        whole = nn.Linear(blocks.inputs, blocks.outputs, bias=False, device="meta", dtype=blocks.dtype)
        whole.bias = module.bias
        step = 1
        if self._exact and kernel.name in QUANTISED:
            step = row_step(kernel, blocks.dtype, blocks.inputs, blocks.outputs, blocks.weights.device)
        return Linear(whole, kernel, blocks, step)

    def _replaced(self, module: nn.Linear) -> nn.Module | None:
        """The replacement of a layer of floats; None to keep it."""
        weight = module.weight.detach()
        kernel, packed, single, step = self._packed(module, weight)
        if kernel.copies:
            self.kernels[kernel.name] += 1
            self.packed.append(module)
            if not single:
                self.doubled.append(module)
        elif step == 1 and self._kernel is None:
            return None
        return Linear(module, kernel, packed, step, weight if single else None)

    def _packed(self, module: nn.Linear, weight: Tensor) -> tuple[Kernel, Any, bool, int]:
        """A layer's kernel, its weights for it, whether the stock layer takes a single row, and the step."""
        if self._kernel is not None:
            packed = self._kernel.pack(weight) if weight.dtype in self._kernel.dtypes else None
            kernel, packed = (STOCK, weight) if packed is None else (self._kernel, packed)
            return kernel, packed, False, self._step(kernel, weight)
        if self._quantise:
            kernel = QUANTISED["int8" if module is self._head else self._quantise]
            if (packed := kernel.pack(weight)) is None:
                kernel = QUANTISED["int8"]
                packed = kernel.pack(weight)
            return kernel, packed, False, self._step(kernel, weight)
        if self._exact:
            return self._exactly(weight)
        if self._pack:
            kernel = chosen_kernel(weight.dtype)
            if kernel.takes(weight) and (packed := kernel.pack(weight)) is not None:
                # MKL reads the weights of a single row in float32 faster.
                return kernel, packed, weight.dtype == torch.float32, 1
        return STOCK, weight, False, 1

    def _step(self, kernel: Kernel, weight: Tensor) -> int:
        outputs, inputs = weight.shape
        return row_step(kernel, weight.dtype, inputs, outputs, weight.device) if self._exact else 1

    def _exactly(self, weight: Tensor) -> tuple[Kernel, Any, bool, int]:
        """``_packed`` for a layer of a bit-exact step."""
        kernels: dict[Kernel, None] = {STOCK: None}
        if self._pack:
            kernels = dict.fromkeys([COMPILED, *reversed(KERNELS)])
        refused = []
        for kernel in kernels:
            if weight.dtype not in kernel.dtypes:
                continue
            try:
                packed, step = kernel.pack(weight), self._step(kernel, weight)
            except UnsupportedModel as error:
                refused.append(str(error))
                continue
            except UNAVAILABLE:
                continue
            if packed is not None:
                return kernel, packed, False, step
        raise UnsupportedModel("; ".join(refused))


def pack_drafter(module: nn.Module) -> None:
    """Replace the linear layers of a frozen drafter on a CPU by packed ones.

    Where there are compiled products in bfloat16, weights in bfloat16 are rounded to int8: reading
    them is most of a drafter's time, and the target verifies its drafts. Its norms are then compiled too.
    """
    half = {layer.weight.dtype for layer in linears_of(module)} == {torch.bfloat16}
    rounds = half and isinstance(chosen_kernel(torch.bfloat16), Compiled)
    packer = Packer(module, pack=True, exact=False, kernel=QUANTISED["int8"] if rounds else None)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if (replaced := packer(child)) is not None:
                setattr(parent, name, replaced)
            elif rounds and type(child) is nn.RMSNorm and child.eps and not child.weight.numel() % LANES:
                setattr(parent, name, CompiledNorm(child.weight, child.eps))


def _stepped(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a step runs, by name: all, or, if the model reads images too, those that decode."""
    if not is_multimodal(getattr(model, "config", None)):
        yield from model.named_modules()
        return
    yield from model.get_decoder().named_modules()
    yield "head", model.get_output_embeddings()


def linears_of(model: Any, dtypes: Collection[torch.dtype] = STOCK.dtypes) -> list[nn.Linear]:
    """A model's layers that a kernel may replace, by dtype: none with hooks, and none that are quantised.

    A quantised layer is a subclass, or its weight is: torchao's has the dtype that its products have. Mamba
    multiplies the weight of one layer itself.
    """
    read = {module.dt_proj for module in model.modules() if reads_step_weight(module)}
    return [
        module
        for _, module in _stepped(model)
        if type(module) is nn.Linear
        and module not in read
        and type(module.weight) in (nn.Parameter, Tensor)
        and module.weight.dtype in dtypes
        and not has_hooks(module)
    ]


def why_unproven(step: nn.Module) -> str | None:
    """The first module for which a row's bits are not known to be independent of the other rows.

    They are for linear layers (``row_step``), for embeddings, which only look up, and for the convolutions of
    recurrent layers, which are computed here (``inputs/states.py``). For others, such as
    experts that multiply the rows routed to them, they are not; the bit test may pass them by chance, because
    rounding to a half dtype hides nearly all effects of the order of a sum.

    Returns:
        Its name and the reason; None if there is none.
    """
    known = {*linears_of(step), *convolutions_of(step)}
    for name, module in _stepped(step):
        if not isinstance(module, Linear | nn.Embedding | Table) and module not in known:
            # What a recurrent layer has as a buffer are factors of single numbers (Falcon-H1).
            buffers = () if is_adapted(module) else module.buffers(recurse=False)
            weights = [*module.parameters(recurse=False), *buffers]
            if any(weight.dim() > 1 for weight in weights):
                return f"{name} ({type(module).__name__}) multiplies rows in another way"
    return None


def has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[name] for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))


def tail_step(model: Any) -> int:
    """Number of rows whose activations fill a whole number of the processor's vectors.

    torch computes the last elements of a tensor one by one if they do not fill a vector, and some functions
    (SiLU, GELU, sigmoid, softplus) then round differently.
    """
    wide = torch.backends.cpu.get_cpu_capability() == "AVX2"
    elements = 2 * (32 if wide else 64) // model.dtype.itemsize  # two vectors at a time
    head = model.get_output_embeddings()
    layers = [m for _, m in _stepped(model) if isinstance(m, nn.Linear | Linear) and m is not head]
    sizes = {layer.out_features for layer in layers}
    return max((elements // math.gcd(elements, size) for size in sizes if size >= elements), default=1)


def release(layers: Iterable[nn.Linear]) -> None:
    """Free the weights of layers; their shapes and dtypes stay."""
    for layer in layers:
        layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)
