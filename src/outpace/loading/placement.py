"""Placement of a model: one device, several devices or several processes; its dtype, and whether it fits."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from outpace.core import OutpaceError, first_line, install
from outpace.targets.hardware import total_bytes
from outpace.targets.ranks.processes import Ranks
from outpace.targets.weights.needs import GIB, Needs

_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Shared:
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
        if importlib.util.find_spec("accelerate") is None:
            raise OutpaceError(f"a device map needs accelerate: {install('devices')}")
        if text in _MAPS:
            return cls(text)
        try:
            layers = json.loads(text)
        except ValueError:
            layers = None
        if not isinstance(layers, dict) or not layers:
            raise OutpaceError(
                f"a device map must be {', '.join(_MAPS)}, or JSON from module to device, as in "
                f'\'{{"model.layers.0": 0, "": "cpu"}}\'; not {text!r}'
            )
        if "disk" in layers.values():
            raise OutpaceError("weights on disk would be read in every step; put those modules on cpu")
        return cls(layers)

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
Place = str | Spread | Shared | None


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


def dtype_of(dtype: str, device: torch.device) -> torch.dtype | str:
    """The dtype of a name. "auto" is float32 on a CPU, and stays "auto" on a GPU: the model's own.

    Raises:
        OutpaceError: there is no such dtype.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise OutpaceError(f"unknown dtype {dtype!r}; there are: auto, {', '.join(DTYPES)}")
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
    if isinstance(place, Shared):
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
