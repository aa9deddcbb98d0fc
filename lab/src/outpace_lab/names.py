"""Names that a user of the laboratory gives: checks that import no torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from outpace.core import OutpaceError, near

METHODS = (
    "blockwise", "dflash", "draft_model", "eagle", "early_exit", "hydra", "medusa", "mtp",
    "parallel_tokens", "spec_drafter",
)  # fmt: skip
OBJECTIVES = ("ground_truth", "forward_kl", "reverse_kl", "jensen_shannon", "total_variation")
Measure = Literal["counts", "seconds"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
THROUGHPUT, LATENCY = "throughput", "latency"
GGUF_DTYPES = ("float32", "float16", "bfloat16", "q8_0", "q4_0")
# Drafters with weights that are not trained here, and what is instead.
UNTRAINED = MappingProxyType({
    "assistant": "it is published with its target; train eagle, which reads the target's states too",
    "self_speculative": "`outpace search` finds the layers to skip",
})  # fmt: skip
WAYS = ("lora",)  # of training a model with its drafter


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not a known one.

    Args:
        kind: what it names, for the message.

    Raises:
        OutpaceError: it is unknown; the message lists the known ones.
    """
    if name not in known:
        raise OutpaceError(f"there is no {kind} {name!r}.{near(name, known)} There are: {', '.join(known)}")


def method_of(spec: str) -> str:
    """The method in a spec without JSON, as in ``medusa:heads=5``, that is trained.

    Raises:
        OutpaceError: there is no such method, or it is not trained.
    """
    name = spec.partition(":")[0].strip()
    if why := UNTRAINED.get(name):
        raise OutpaceError(f"{name} is not trained: {why}")
    check_known("method", name, METHODS)
    return name


def check_data(source: str) -> None:
    """Refuse data that is not here, before torch is imported; the hub's is asked for when it is read.

    Raises:
        OutpaceError: there is no such file or folder.
    """
    if not source.startswith("hub:") and not Path(source).exists():
        raise OutpaceError(f"cannot read {source}: no such file or folder; hub:name=NAME reads the hub's")
