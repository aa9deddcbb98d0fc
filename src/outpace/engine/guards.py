"""Guards of an engine: one thread and one call at a time, a clock that runs forwards, plain arguments."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outpace.core import OutpaceError

_TICK, _LONGEST = 1e-9, 86400.0  # seconds that pass at least, and at most, from one reading to the next


class Turn:
    """Lets in the thread that came first, one call at a time.

    Another thread takes over once the first has ended, or after ``release``.
    """

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._owner: threading.Thread | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A call to the engine.

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
        try:
            yield
        finally:
            self._busy.release()

    def release(self) -> None:
        """Let another thread take over."""
        self._owner = None


class Clock:
    """Seconds since it was made, read from another clock, that always increase.

    Where the other clock stops, goes back, jumps by a day or is not a finite number, a nanosecond passes.
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
    """An argument that is a whole number.

    Raises:
        OutpaceError: it is something else, or too small.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise OutpaceError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return number
