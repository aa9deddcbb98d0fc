"""Names of the hardware a model runs on, on which the seconds of its forwards depend."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

import torch

_PROCESSORS = Path("/proc/cpuinfo")


def processor() -> str:
    """The processor's name, as far as the system reports it."""
    if _PROCESSORS.exists():
        for line in _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware(devices: Iterable[torch.device]) -> list[str]:
    """The names of GPUs among some devices; where there are none, the processor's, and torch's threads."""
    names = sorted({torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"})
    return names or [processor(), f"{torch.get_num_threads()} threads"]
