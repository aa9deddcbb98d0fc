"""Whether two computations of the same logits agree, but for rounding."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.inputs.forward import embeddings_of
from outpace.transfer import widened

_SHAPES_DIFFER = 8  # times that computations of the same logits may differ by more than two known ones do


@contextmanager
def shaken(model: Any) -> Iterator[None]:
    """Change the embeddings that a model reads, in this thread, by a unit in the last place."""
    ours = threading.get_ident()
    generator = torch.Generator().manual_seed(0)

    def shake(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if threading.get_ident() != ours:
            return None
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output) * 2 - 1
        return output * (1 + signs * torch.finfo(output.dtype).eps)

    embeddings = embeddings_of(model.get_decoder())
    hook = embeddings.register_forward_hook(shake)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def hooks_restored(*models: Any) -> Iterator[None]:
    """Remove the hooks that forwards leave in models: transformers' for hidden states stay otherwise."""
    flag, kinds = "_output_capturing_hooks_installed", ("_forward_hooks", "_forward_pre_hooks")
    modules = {module for model in models for module in model.modules()}
    kept = {(module, kind): set(vars(module)[kind]) for module in modules for kind in kinds}
    flagged = {module for module in modules if flag in vars(module)}
    try:
        yield
    finally:
        for (module, kind), hooks in kept.items():
            for hook in set(vars(module)[kind]) - hooks:
                del vars(module)[kind][hook]
                vars(module)[f"{kind}_with_kwargs"].pop(hook, None)
        for module in modules - flagged:
            vars(module).pop(flag, None)


def agree(found: Tensor, expected: Tensor, again: Tensor) -> bool:
    """True if two computations of the same logits, [n, vocabulary], differ only by rounding.

    Args:
        again: ``expected`` computed in another plain way, of which rounding is all the difference.
    """
    off, apart = (difference(widened(expected), widened(logits)) for logits in (found, again))
    return off <= largest_difference(expected.dtype, apart)


def difference(rows: Tensor, others: Tensor) -> float:
    """The largest root mean square over rows, as a share of the spread of a row's logits."""
    difference = (rows - others.to(rows.device)).square().mean(dim=-1).sqrt()
    return float((difference / rows.std(dim=-1, correction=0).clamp(min=1e-12)).max())


def largest_difference(dtype: torch.dtype, apart: float) -> float:
    """The largest difference of computations of the same logits, if two known ones differ by ``apart``.

    At least by half of the digits: some attention computes its softmax in float32 in any dtype.
    """
    digits = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return max(_SHAPES_DIFFER * apart, math.sqrt(digits))
