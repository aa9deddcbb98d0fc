"""Number of a cache's rows that fit into memory."""

from __future__ import annotations

from typing import Any

import torch

from outpace.cache import Cache
from outpace.core import OutpaceError
from outpace.targets.hardware import free_bytes


def capacity_of(memory: Any, cache: Cache, device: torch.device) -> int | None:
    """Rows that a cache may reserve; None for no limit.

    Args:
        memory: bytes; below 1, a share of what is free; None for no limit.

    Raises:
        OutpaceError: it is something else.
    """
    if memory is None:
        return None
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not memory > 0:
        raise OutpaceError(
            f"memory is a number of bytes, a share of what is free below 1, or None; not {memory!r}"
        )
    free = free_bytes(device) if memory < 1 else 1
    if free is None or not cache.row_bytes:
        return None
    return int(memory * free) // cache.row_bytes
