"""Detection of changes to a model since a target's steps were made from it: of weights, buffers and modules.

torch counts writes to a tensor, but not those through ``weight.data``, through NumPy, or by an optimiser with
``fused=True``. So when a text begins a sample of each weight's numbers is compared too. A write that is not
counted and misses the sample is not seen; ``CausalTarget.renew`` is for those. Of weights that are pages of a
file the system knows whether any was written (``mapped.py``), so those are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.inputs.attributes import Attributes
from outpace.targets.inputs.config import family
from outpace.targets.inputs.mapped import FileMemory, written

_VERSION = attrgetter("_version")
_FORM = attrgetter("shape", "dtype")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
_PLAIN = (Tensor, nn.Parameter)
_EVERY, _LEAST = 8192, 64  # one number in 8,192 is compared, and at least 64 of each matrix
# Where the functions are from that transformers and this package set as hooks; they change no output.
_HARMLESS = ("transformers.utils.output_capturing", "outpace.")


class Addresses:
    """Detector of weights and buffers that were replaced, or whose memory was.

    ``load_state_dict(assign=True)`` replaces a parameter, ``weight.data = ...`` its memory.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Looked up in the modules' dicts, since nn.Module's own look-up takes longer.
        self._parameters: list[tuple[Mapping[str, Tensor | None], str]] = [
            (tensors, name)
            for module in modules
            for tensors in (module._parameters, module._buffers)
            for name in tensors
        ]
        self._found = self._current()
        self._weights: list[Any] = list(
            {id(weight): weight for weight in self._found if _plain(weight)}.values()
        )
        self._held = self._memory()

    def _current(self) -> list[Any]:
        return [parameters.get(name) for parameters, name in self._parameters]

    def _memory(self) -> list[Any]:
        return [
            *map(Tensor.data_ptr, self._weights),
            *map(Tensor.stride, self._weights),
            *map(_FORM, self._weights),
        ]

    def moved(self) -> bool:
        """True if a weight is another tensor now, or has other memory, another shape or another dtype."""
        return any(map(is_not, self._current(), self._found)) or self._memory() != self._held


def _plain(weight: Any) -> bool:
    """True unless a weight may have no memory of its own, as those of quantised layers, or is complex."""
    return type(weight) in _PLAIN and weight.layout is torch.strided and not weight.is_complex()


class WatchedWeights(Addresses):
    """Detector of weights that were modified or replaced."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules)
        # Tensors made in inference mode do not count writes, and released ones cannot be written.
        self._counted = [tensor for tensor in self._weights if not (tensor.is_inference() or tensor.is_meta)]
        self._written = self._writes()
        files = FileMemory()
        mapped = [(weight, files.ranges([weight])) for weight in self._weights]
        self._ranges = [one for _, ranges in mapped for one in ranges]
        # The views keep the memory, so no other tensor gets its address.
        samples: dict[tuple[torch.device, int], list[Tensor]] = {}
        for weight, ranges in mapped:
            if weight.numel() and not (weight.is_meta or ranges):
                samples.setdefault((weight.device, weight.itemsize), []).append(sample(weight))
        self._samples = list(samples.values())
        self._values = self._sampled()

    def _writes(self) -> int:
        return sum(map(_VERSION, self._counted))

    @torch.no_grad()
    def _sampled(self) -> list[Tensor]:
        return list(map(torch.cat, self._samples))

    def changed(self, thorough: bool) -> bool:
        """True if a write was counted, or, with ``thorough``, some were replaced or have other values.

        The comparison of values takes a few hundredths of a forward's time.
        """
        if self._writes() != self._written:
            return True
        if not thorough:
            return False
        same = self._sampled()
        return self.moved() or written(self._ranges) or not all(map(torch.equal, same, self._values))


def sample(weight: Tensor) -> Tensor:
    """A view of some of a weight's numbers as integers, one-dimensional.

    All of a vector; of a matrix every 8,192nd or so, and at least 64. The stride has no divisor in common
    with a row's length, or it could pass through a few columns alone.
    """
    found = weight.detach().view(_BITS[weight.itemsize])
    steps = sorted((step, size) for size, step in zip(found.shape, found.stride(), strict=True) if size > 1)
    span = 1 + sum((size - 1) * step for step, size in steps)
    stride = 1
    if len(steps) > 1:
        stride = max(1, min(_EVERY, span // _LEAST))
        while math.gcd(stride, steps[1][0]) > 1:
            stride -= 1
    return found.as_strided((math.ceil(span / stride),), (stride,))


class Structure:
    """Detector of modules of a model that were replaced, wrapped, added or removed, or given hooks or a
    ``forward`` of their own; of their attributes, as numbers and functions; of settings of their configs; and
    of a conversion to another dtype or device.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._converted = model, (model.dtype, model.device)
        self.accept()

    def accept(self) -> None:
        """Take the model's modules as they are now."""
        self._modules = list(self._model.modules())
        self._known, self._attributes = self._now(), Attributes(self._model)

    def changed(self, modules: bool = True) -> str | None:
        """The reason why a target made before no longer fits the model; None if it does.

        Args:
            modules: look at all of modules, as needed where steps run copies of them.
        """
        converted = self._model.dtype, self._model.device
        if converted != self._converted:  # caches have rows of the former
            now, then = (f"{dtype} on {device}" for dtype, device in (converted, self._converted))
            return (
                f"the model is {now}, but this target was made for {then}; make a new target after "
                "converting or moving a model"
            )
        if modules and self._now() != self._known:
            return (
                f"modules of {family(self._model)} were replaced, wrapped or given hooks after this target "
                "was made; make a new target and engine"
            )
        other = self._attributes.reconfigured() or self._attributes.changed(everywhere=modules)
        if other:
            return (
                f"{other} since this target of {family(self._model)} was made; make a new target and engine"
            )
        return None

    def _now(self) -> list[Any]:
        of_modules = list(map(vars, self._modules))
        return [
            *chain.from_iterable(fields["_modules"].values() for fields in of_modules),
            *chain.from_iterable(map(hooks_of, self._modules)),
            *(fields["forward"] for fields in of_modules if "forward" in fields),
        ]


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of a module's forward, except those that record hidden states, and this package's own."""
    fields = vars(module)
    if not (fields["_forward_hooks"] or fields["_forward_pre_hooks"]):
        return []
    hooks = [*fields["_forward_hooks"].values(), *fields["_forward_pre_hooks"].values()]
    return [hook for hook in hooks if not getattr(hook, "__module__", "").startswith(_HARMLESS)]
