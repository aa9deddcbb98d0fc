"""A lock whose threads have equal times of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from weakref import WeakKeyDictionary

_RETURN = 0.02  # seconds for a thread to come back before its time passes to others


class FairLock:
    """A lock for threads that compute in turns, as engines do with their steps.

    ``threading.Lock`` goes to any thread that asks, and so again and again to the one that has just left it.
    Turns alone are not fair either, where one thread's take longer. So the next is the one that has had least
    time since it began to ask; a thread that leaves may come back at once, before one that has had more. Time
    in which a thread did not ask is lost.

    Args:
        clock: function that returns the time in seconds.
        back: seconds for which the lock is kept for a thread that may come back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, back: float = _RETURN) -> None:
        self._clock, self._back = clock, back
        self._changed = threading.Condition()  # guards the rest
        self._holder: threading.Thread | None = None
        self._since = 0.0  # the clock when it got the lock
        self._start = 0.0  # the time that it had had by then; a newcomer counts as having had as much
        self._had: WeakKeyDictionary[threading.Thread, float] = WeakKeyDictionary()
        self._line: dict[threading.Thread, float] = {}  # who waits, with the time that each has had
        self._kept: threading.Thread | None = None  # for whom the lock is kept
        self._until = 0.0  # until when

    def __enter__(self) -> None:
        here = threading.current_thread()
        with self._changed:
            had = max(self._start, self._had.get(here, 0.0))
            self._line[here] = had
            try:
                while not self._is_next(here):
                    kept = self._holder is None and self._kept is not None
                    self._changed.wait(max(self._until - time.monotonic(), 0.0) if kept else None)
            except BaseException:  # an interrupt
                del self._line[here]
                self._changed.notify_all()
                raise
            del self._line[here]
            self._holder, self._kept = here, None
            self._start, self._since = had, self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        here = threading.current_thread()
        with self._changed:
            had = self._start + self._clock() - self._since
            self._had[here], self._holder = had, None
            self._kept = here if self._line and had < min(self._line.values()) else None
            self._until = time.monotonic() + self._back
            self._changed.notify_all()

    def _is_next(self, here: threading.Thread) -> bool:
        if self._holder is not None:
            return False
        if self._kept is not None and time.monotonic() < self._until:
            return self._kept is here
        return min(self._line, key=self._line.__getitem__) is here
