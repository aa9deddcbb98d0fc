"""Whether a model's linear layers are packed or rounded on a CPU: the options, and the reasons not to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outpace.core import UnsupportedModel
from outpace.targets.cpu.kernels import KERNELS, QUANTISED
from outpace.targets.cpu.linear import has_hooks, linears_of
from outpace.targets.cpu.trials import chosen_kernel, why_unavailable
from outpace.targets.hardware import free_bytes
from outpace.targets.inputs.config import family, is_multimodal
from outpace.targets.inputs.refusals import why_untouchable
from outpace.targets.kernel import Kernel

_SHARE = 0.5  # share of the free memory that copies of weights may use by default
NO_MEMORY = "too little memory is free for copies of its weights"


def why_not_packed(model: Any, exact: bool, asked: bool) -> str | None:
    """The reason not to pack a model's weights; None to pack them.

    Args:
        exact: for a bit-exact step, whether it is faster or not.
        asked: packed steps are asked for, however small the layers are, and however little memory is free.
    """
    why = why_untouchable(model) or _why_none_packed(model, exact, asked)
    return why or (None if asked or copies_fit(model) else NO_MEMORY)


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


def _why_none_packed(model: Any, exact: bool, asked: bool) -> str | None:
    """The reason why none of a model's layers would be packed; None if some would."""
    layers = linears_of(model)
    if not layers:
        return "it has no plain linear layers in float32, bfloat16 or float16"
    if exact:
        return None
    largest = max((layer.weight for layer in layers), key=Tensor.numel)
    kernel, dtype = chosen_kernel(largest.dtype), largest.dtype
    if kernel.copies:
        return None if asked or kernel.takes(largest) else "its layers are too small to gain from it"
    others = [one for one in KERNELS if one.copies and dtype in one.dtypes]
    return "; ".join(f"{one.name} is not available here: {why_unavailable(one, dtype)}" for one in others)
