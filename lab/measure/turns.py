"""Processor time of ways to do one thing, which take turns: shared by the scripts beside this file."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def taken(
    ways: dict[str, Callable[[], Any]], rounds: int, among: Callable[[list[float]], float]
) -> dict[str, float]:
    """Milliseconds of this thread that each way takes, after a warm-up round.

    Args:
        among: picks one of a way's times, such as ``min`` or ``statistics.median``.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began = time.thread_time()
            way()
            found[name].append((time.thread_time() - began) * 1e3)
    return {name: round(among(times[1:]), 3) for name, times in found.items()}
