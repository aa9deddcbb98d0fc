"""A lock that threads get in the order in which they ask for it."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock for threads that take turns, as engines do with their steps.

    ``threading.Lock`` goes to any thread that asks, and so again and again to the one that has just left it.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of the next two
        self._held = False
        self._line: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        turn = threading.Lock()
        turn.acquire()
        with self._guard:
            if not self._held:
                self._held = True
                return
            self._line.append(turn)
        try:
            turn.acquire()
        except BaseException:  # an interrupt, before the turn or just after it
            with self._guard:
                waits = turn in self._line
                if waits:
                    self._line.remove(turn)
            if not waits:
                self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._guard:
            if self._line:
                self._line.popleft().release()
            else:
                self._held = False
