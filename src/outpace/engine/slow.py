"""Why decoding is more than 1.5 times slower than it could be on this machine: one line with the remedy each.

docs/measurements/steps.md has the measurements of steps without compiled functions and in float32.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch

from outpace.core import TargetOptions
from outpace.drafters.base import Drafter
from outpace.drafters.none import NoDraft
from outpace.embedded import CACHE
from outpace.native import build, layers
from outpace.policy.plan import Policy
from outpace.targets.base import TargetModel
from outpace.targets.plan import FIXED, NATIVE
from outpace.verify import Verifier

_log = logging.getLogger(__name__)


def reasons(
    target: TargetModel,
    drafter: Drafter[Any] | None = None,
    policy: Policy | None = None,
    verifier: Verifier | None = None,
) -> tuple[str, ...]:
    """The reasons; none if decoding is as fast as is known here.

    Args:
        drafter, policy, verifier: those of an engine; without them the target alone is looked at.
    """
    found = [_step(target)] if target.device.type == "cpu" else [_graphs(target)]
    if drafter is not None and verifier is not None:
        found.append(_governor(drafter, policy, verifier))
    return tuple(filter(None, found))


@lru_cache(maxsize=64)
def tell(reason: str) -> None:
    """Log a reason, once in a process."""
    _log.warning("%s", reason)


def _step(target: TargetModel) -> str:
    options, plan = options_of(target), target.plan
    if options is None or target.quantised:
        return ""
    if options.stock:
        return "steps run on transformers' own modules, as asked for; leave stock out for faster ones"
    dtype = str(target.dtype).removeprefix("torch.")
    if plan.own_dtype == "bfloat16" and not plan.dtype and dtype in ("float32", "float64"):
        return f"weights are {dtype}, as asked for; bfloat16, the model's own, is faster: leave dtype out"
    why = None if plan.native else plan.why_not(NATIVE)
    if why and isinstance(layers_of(target.dtype), str):
        return f"steps run without compiled functions: {layers_of(target.dtype)}"
    if why and options.plan:
        return f"forwards are not native: {why}; leave plan out for faster steps"
    if why == FIXED:
        return f"forwards are not native, since {why}; leave static out for faster steps"
    if why:
        return f"forwards are not native: {why}; docs/reference/models.md names the families that are"
    if anew := build.why_compiled_anew():
        return f"functions in C are compiled in each process: {anew}; set {CACHE} to another folder"
    return ""


def _graphs(target: TargetModel) -> str:
    options = options_of(target)
    if options is None or options.static or target.device.type != "cuda":
        return ""
    why = target.plan.no_graphs or "static is off; leave it out"
    return f"forwards on this GPU are launched one kernel at a time: {why}"


def _governor(drafter: Drafter[Any], policy: Policy | None, verifier: Verifier) -> str:
    """The reason why drafts may cost more than they save."""
    if policy is not None or isinstance(drafter, NoDraft) or not verifier.invariant:
        return ""
    return "nothing decides how much to draft, as asked for; leave adaptive out, for drafts that pay"


def options_of(target: TargetModel) -> TargetOptions | None:
    """The options of a transformers model's target, also inside another; None for others."""
    while (inner := getattr(target, "inner", None)) is not None:
        target = inner
    found = getattr(target, "options", None)
    return found if isinstance(found, TargetOptions) else None


def layers_of(dtype: torch.dtype) -> object:
    """The compiled functions of a dtype; the reason why there are none here; None for a dtype without any."""
    return layers.functions(dtype) if dtype in layers.DTYPES else None
