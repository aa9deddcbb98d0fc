"""Whether a model's linear layers are packed or rounded on a CPU: the options, and the reasons not to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.cpu.kernels import KERNELS, QUANTISED
from outpace.targets.cpu.linear import has_hooks, linears_of
from outpace.targets.cpu.trials import best_kernel, why_unavailable
from outpace.targets.hardware import free_bytes
from outpace.targets.inputs.config import family, is_multimodal
from outpace.targets.inputs.refusals import why_untouchable
from outpace.targets.kernel import Kernel

_PACKED = {kernel.name: kernel for kernel in KERNELS if kernel.copies}
_SHARE = 0.5  # share of the free memory that copies of weights may use by default
NO_MEMORY = "too little memory is free for copies of its weights"


def check_pack(pack: bool | str, quantise: str | None) -> None:
    """Refuse an unknown way to pack weights.

    Raises:
        OutpaceError: there is no such kernel, or ``quantise`` chooses another.
    """
    if not isinstance(pack, bool) and pack != "auto" and pack not in _PACKED:
        raise OutpaceError(
            f"pack must be True, False, 'auto' or the name of a kernel, {', '.join(_PACKED)}; not {pack!r}"
        )
    if quantise is not None and pack in _PACKED:
        raise OutpaceError(f"quantise={quantise!r} has kernels of its own; leave pack={pack!r} out")


def why_not_packed(model: Any, pack: bool | str, exact: bool) -> str | None:
    """The reason not to pack a model's weights; None to pack them.

    Args:
        exact: for a bit-exact step, whether it is faster or not.
    """
    if pack is False:
        return "pack is off"
    if isinstance(pack, str) and (kernel := _PACKED.get(pack)):
        return why_untouchable(model) or _why_not_for(kernel, model)
    why = why_untouchable(model) or _why_none_packed(model, exact)
    return why or (None if pack is True or copies_fit(model) else NO_MEMORY)


def packing_wanted(model: Any, pack: bool | str, exact: bool) -> bool | Kernel:
    """Decide whether to pack a model, or with which kernel; ``exact`` as for ``why_not_packed``.

    Raises:
        UnsupportedModel: ``pack`` is True, or a kernel's name, but the model cannot be packed.
    """
    why = why_not_packed(model, pack, exact)
    if why and pack not in (False, "auto"):
        by = "" if pack is True else f" by {pack}"
        raise UnsupportedModel(f"{family(model)} cannot be packed{by}: {why}; leave pack out")
    return _PACKED[str(pack)] if pack in _PACKED else not why


def copies_fit(model: Any) -> bool:
    """True if the free memory allows a copy of the weights of a model's linear layers."""
    free = free_bytes(torch.device("cpu"))
    return free is None or sum(layer.weight.nbytes for layer in linears_of(model)) <= free * _SHARE


def check_quantise(model: Any, quantise: str | None) -> None:
    """Refuse a model whose weights cannot be rounded.

    Raises:
        UnsupportedModel: the model does not allow it.
    """
    if quantise is not None and (
        why := why_untouchable(model) or _why_not_rounded(model, QUANTISED[quantise])
    ):
        raise UnsupportedModel(f"{family(model)} cannot be quantised to {quantise}: {why}")


def _why_not_rounded(model: Any, kernel: Kernel) -> str | None:
    """The reason not to round a model's weights for a kernel; None if there is none."""
    if model.dtype not in kernel.dtypes:
        return f"the kernel is for bfloat16, and the model is in {model.dtype}; load it in bfloat16"
    if is_multimodal(model.config):
        return "it reads more than text; leave quantise out"
    known = set(linears_of(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module not in known:
            what = "has hooks" if has_hooks(module) else "is quantised or replaced already"
            return f"{name} ({type(module).__name__}) {what}; leave quantise out"
    if not known:
        return "it has no linear layers"
    return None


def _why_not_for(kernel: Kernel, model: Any) -> str | None:
    """The reason why a kernel takes none of a model's layers; None if it takes some."""
    dtypes = {layer.weight.dtype for layer in linears_of(model)} & kernel.dtypes
    if not dtypes:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
        return f"it has no plain linear layers in {' or '.join(names)}"
    return next(filter(None, (why_unavailable(kernel, dtype) for dtype in dtypes)), None)


def _why_none_packed(model: Any, exact: bool) -> str | None:
    """The reason why none of a model's layers would be packed; None if some would."""
    layers = linears_of(model)
    if not layers:
        return "it has no plain linear layers in float32, bfloat16 or float16"
    if exact:
        return None
    largest = max((layer.weight for layer in layers), key=Tensor.numel)
    dtype = largest.dtype
    if not any(kernel.takes(largest) for kernel in KERNELS if kernel.copies and dtype in kernel.dtypes):
        return "its layers are too small to gain from it"
    trial = best_kernel(dtype, torch.get_num_threads())
    if trial.kernel.takes(largest) and trial.kernel.copies:
        return None
    return "; ".join(f"{name}: {what}" for name, what in trial.outcomes.items())
