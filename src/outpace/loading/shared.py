"""One model in several processes: each loads its part, the first decodes, and the others serve it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outpace.core import OutpaceError, TargetOptions
from outpace.loading.loaded import Loaded, load_here, made
from outpace.loading.placement import SharedModel, dtype_of
from outpace.loading.weights import load_weights
from outpace.names import ADAPTER, source_of
from outpace.policy.latency import LatencyModel
from outpace.targets.ranks.led import LedTarget, follow
from outpace.targets.ranks.processes import Ranks
from outpace.targets.ranks.shared_drafts import ParallelTarget, deal, typical


def load_shared(
    name: str | None, dtype: str, shared: SharedModel, trust_remote_code: bool, quantise: str | None = None
) -> Loaded:
    """This process's part of a model; it returns in the first process only.

    The others serve the first until it ends, and then exit (``SystemExit``).

    Raises:
        OutpaceError, UnsupportedModel: as ``outpace.load``.
        RanksLost: another process has failed.
    """
    ranks = shared.ranks
    part = _whole if shared.parallel == "draft" else _sharded
    try:
        if quantise is not None:
            raise OutpaceError("weights are rounded in one process only; leave --quantise or --parallel out")
        loaded = part(name, dtype, ranks, trust_remote_code)
    except Exception as error:
        raise ranks.lost(error) from error
    ranks.ready()
    if not ranks.leads:
        follow(loaded.target, ranks)
        raise SystemExit(0)
    return replace(loaded, target=LedTarget(loaded.target, ranks))


def _own_device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _whole(name: str | None, dtype: str, ranks: Ranks, trust_remote_code: bool) -> Loaded:
    """The whole model, to verify a share of every draft."""
    loaded = load_here(name, dtype, _own_device(), trust_remote_code)
    shares = ParallelTarget(loaded.target, ranks)
    latency = latency_of(shares)
    shares.least = 1 + latency.pays_from if latency.pays_from is not None else math.inf
    return replace(loaded, target=shares, costs=latency.costs())


def _sharded(name: str | None, dtype: str, ranks: Ranks, trust_remote_code: bool) -> Loaded:
    """This rank's shard of every layer."""
    source, chosen = source_of(name), dtype_of(dtype, torch.device(_own_device()))
    if name is not None and (Path(name).expanduser() / ADAPTER).is_file():
        raise OutpaceError(f"{name} contains updates of a model; save the merged model to share it")
    shown, model, tokenizer = load_weights(name, chosen, trust_remote_code, **sharding(ranks.size))
    return made(shown, model, tokenizer, source, TargetOptions(plan="stock"))


def sharding(size: int) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that shard a model over ranks by its own plan."""
    from transformers.distributed.configuration_utils import DistributedConfig

    if "tp_plan" in getattr(DistributedConfig, "__dataclass_fields__", {}):
        return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=size)}
    return {"tp_plan": "auto"}  # before DistributedConfig had a plan


def latency_of(target: ParallelTarget) -> LatencyModel:
    """Measure what shared drafts cost here; all ranks call it together."""

    def share(nodes: int) -> int:
        return max(map(len, deal(typical(nodes), target.peers.size)))

    measured = target.measure()
    return LatencyModel(measured.forwards, measured.telling, share)
