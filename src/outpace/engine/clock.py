"""The clock of an engine, and the seconds of the parts of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

_TICK, _LONGEST = 1e-9, 86400.0  # minimum and maximum seconds between two readings

Span = Literal["draft", "verify", "keep", "observe", "learn"]


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


class StepClock:
    """The seconds of one step by spans, each of which begins where the one before it ends.

    ``draft``: the drafters draft, and their drafts are cut. ``verify``: the target's forward, and the
    verification. ``keep``: the cache keeps the rows of accepted tokens. ``observe``: the drafters and the
    observer are shown the step. ``learn``: the policies are told the seconds, and sequences join or leave.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.seconds: dict[Span, float] = {}

    def end(self, span: Span) -> None:
        now = self._clock()
        self.seconds[span], self._began = now - self._began, now

    @property
    def drafting(self) -> float:
        """Seconds of the drafters: of their drafts, and of what they do with the outcome."""
        return self.seconds["draft"] + self.seconds["observe"]

    @property
    def forward(self) -> float:
        """Seconds of the forward and of what depends on its rows."""
        return self.seconds["verify"] + self.seconds["keep"]

    @property
    def rest(self) -> float:
        """Seconds that are neither the drafters' nor of the verification."""
        return self.seconds["keep"] + self.seconds["learn"]
