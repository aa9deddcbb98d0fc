"""Names and memory of a model's hardware, on which the time of its forwards depends."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from outpace.native.instructions import chosen
from outpace.native.pool import follow_torch

_PROCESSORS = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


def processor() -> str:
    """The processor's name, as far as the system reports it."""
    if _PROCESSORS.exists():
        for line in _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware(devices: Iterable[torch.device]) -> list[str]:
    """The names of the GPUs among these devices; without any, the processor, its limit, threads."""
    names = sorted({torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"})
    limit = [] if (found := chosen()) is None else [f"limited to {found.march}"]
    return names or [processor(), *limit, f"{follow_torch()} threads"]


def free_bytes(device: torch.device) -> int | None:
    return _bytes(device, 0, "MemAvailable")


def total_bytes(device: torch.device) -> int | None:
    return _bytes(device, 1, "MemTotal")


def _bytes(device: torch.device, index: int, name: str) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[index])
    if device.type == "cpu" and _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text("ascii").splitlines())
        found = lines.get(name, "").split()
        return int(found[0]) * 1024 if found else None
    return None
