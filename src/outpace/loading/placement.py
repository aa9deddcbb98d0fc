"""Placement of a model: one device, several devices or several processes; its dtype, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from outpace.core import OutpaceError, first_line
from outpace.names import check_dtype, read_device_map
from outpace.targets.hardware import total_bytes
from outpace.targets.ranks.processes import Ranks
from outpace.targets.weights.needs import GIB, Needs


@dataclass(frozen=True)
class SharedModel:
    """Several processes that share one model.

    Attributes:
        ranks: this process's membership in the group.
        parallel: ``"draft"``: each has the whole model and verifies a share of every draft; ``"tensor"``:
            each has a part of every layer, by the model's own plan (transformers' ``tp_plan="auto"``).
    """

    ranks: Ranks
    parallel: Literal["draft", "tensor"]


@dataclass(frozen=True)
class Spread:
    """Several devices of this process, which share a model's layers.

    Attributes:
        layers: a device map in accelerate's format: ``"auto"``, ``"balanced"``, ``"sequential"``, or
            module -> device.
    """

    layers: str | Mapping[str, int | str]

    @classmethod
    def of(cls, text: str) -> Spread:
        """Parse a device map: a name, or JSON as in '{"model.layers.0": 0, "": "cpu"}'.

        Raises:
            OutpaceError: it is neither, or accelerate is missing.
        """
        return cls(read_device_map(text))

    @property
    def devices(self) -> list[torch.device]:
        """The devices that layers may be placed on.

        Raises:
            OutpaceError: one cannot be used here.
        """
        if isinstance(self.layers, str):
            gpus = [torch.device("cuda", place) for place in range(torch.cuda.device_count())]
            return [*gpus, torch.device("cpu")]
        named = (f"cuda:{place}" if isinstance(place, int) else place for place in self.layers.values())
        return [device_of(name) for name in dict.fromkeys(named)]


# Placement of a model: a device in torch's notation, None for cuda if available; several devices; or
# several processes.
Place = str | Spread | SharedModel | None


def device_of(device: str | None) -> torch.device:
    """The device of a name; None is cuda if available.

    Raises:
        OutpaceError: the device cannot be used here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OutpaceError(f"device {device!r} cannot be used here: {first_line(error)}") from None
    return place


def devices_of(place: Place) -> list[torch.device]:
    """The devices of this process that a model may be placed on."""
    if isinstance(place, Spread):
        return place.devices
    return [device_of(place if isinstance(place, str) else None)]


def dtype_of(dtype: str, device: torch.device, own: torch.dtype | None = None) -> torch.dtype | str:
    """The dtype of a name.

    "auto" stays "auto" on a GPU: the model's own. On a CPU it is float32, or bfloat16 if that is the model's
    own; ``load_here`` keeps bfloat16 only if the target is bit-exact in it.

    Args:
        own: the model's own dtype, if that may be taken on a CPU.

    Raises:
        OutpaceError: there is no such dtype.
    """
    if dtype == "auto":
        on_cpu = torch.bfloat16 if own == torch.bfloat16 else torch.float32
        return on_cpu if device.type == "cpu" else "auto"
    check_dtype(dtype)
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def check_needs(name: str | None, needs: Needs | None, place: Place) -> None:
    """Refuse a model whose weights exceed the available memory.

    Raises:
        OutpaceError: it does not fit; the message gives both sizes and the remedy.
    """
    memory = [total_bytes(device) for device in devices_of(place)] if needs is not None else []
    if needs is None or None in memory:
        return
    room, here = sum(filter(None, memory)), needs.weights
    if isinstance(place, SharedModel):
        alone = place.parallel == "draft"  # each process has the whole model
        on_host = devices_of(place)[0].type == "cpu"  # whose memory all processes share
        here = needs.weights * (place.ranks.size if alone else 1) if on_host else needs.weights
        here = here if alone or on_host else needs.weights // place.ranks.size
    if here > room:
        gib = room / GIB
        raise OutpaceError(
            f"{name} does not fit: {needs}; there are {gib:.1f} GiB here. Divide it: --device-map auto over "
            "the GPUs and the memory of this machine, or torchrun --nproc-per-node N with --parallel tensor "
            f"over N GPUs (of this size at least {-(-needs.weights * 5 // (room * 4))}); or load it in fewer "
            "bits: --dtype bfloat16"
        )
