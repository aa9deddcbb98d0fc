"""Guards of an engine: one thread and one call at a time, a monotonic clock, integer arguments."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable
from typing import Any

from outpace.core import OutpaceError

_TICK, _LONGEST = 1e-9, 86400.0  # minimum and maximum seconds between two readings


class Turn:
    """Ownership of an engine by the first thread that calls it, one call at a time: a context manager.

    Another thread may take over once the owner has ended, or after ``release``.
    """

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._owner: threading.Thread | None = None

    # Two methods, since `contextlib` costs several times as much in each step.
    def __enter__(self) -> None:
        """Begin a call to the engine.

        Raises:
            OutpaceError: the engine belongs to another thread, or the call comes from within a step.
        """
        here = threading.current_thread()
        owner = self._owner
        if owner is not here and owner is not None and owner.is_alive():
            raise OutpaceError(
                f"this engine belongs to the thread {owner.name!r}, which used it first, and was called from "
                f"{here.name!r}; use outpace.AsyncEngine, or one engine per thread"
            )
        if not self._busy.acquire(blocking=False):
            raise OutpaceError(
                "the engine was called in the middle of a call, by a logits processor, a criterion, a "
                "drafter or an observer; call it between two steps"
            )
        self._owner = here

    def __exit__(self, *raised: object) -> None:
        """End the call."""
        self._busy.release()

    def release(self) -> None:
        """Give up ownership."""
        self._owner = None


class Clock:
    """Monotonic clock over another clock, in seconds since construction.

    If the other clock stops, goes back, jumps by a day or returns no finite number, it advances a nanosecond.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._latest = math.nan
        self._seconds = 0.0

    def __call__(self) -> float:
        now = float(self._read())
        passed = now - self._latest
        self._seconds += passed if _TICK < passed < _LONGEST else _TICK
        if math.isfinite(now):
            self._latest = now
        return self._seconds


def whole_number(name: str, value: Any, least: int) -> int:
    """Check an argument that must be a whole number, and return it as an int.

    Raises:
        OutpaceError: it is not a whole number, or too small.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise OutpaceError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return number
