"""Number of cache rows that fit into memory."""

from __future__ import annotations

from typing import Any

import torch

from outpace.cache import Cache
from outpace.core import OutpaceError
from outpace.targets.hardware import free_bytes


def capacity_of(memory: Any, cache: Cache, device: torch.device) -> int | None:
    """Number of rows that a cache may reserve; None for no limit.

    Args:
        memory: bytes; below 1, a share of the free memory; None for no limit.

    Raises:
        OutpaceError: the value is invalid.
    """
    if memory is None:
        return None
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not memory > 0:
        raise OutpaceError(
            f"memory must be a number of bytes, a share of the free memory (below 1), or None; not {memory!r}"
        )
    free = free_bytes(device) if memory < 1 else 1
    if free is None or not cache.row_bytes:
        return None
    return int(memory * free) // cache.row_bytes
