"""The clock of an engine, the seconds of a step by its parts, and the time for work beside steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    Attributes:
        seconds: those of the spans that have ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.seconds: dict[Span, float] = {}

    def end(self, span: Span) -> None:
        """End a span, and begin the next one."""
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


class Allowance:
    """The time that may go to work beside steps: no more than the steps spend on decoding.

    Work is what one request needs and others wait for: images and sources to encode, texts to score, rows to
    copy, a drafter's first look at a prompt. It is cut into pieces. A piece may run while the work is not
    ahead of the steps; one that takes longer than it may delays the next, until steps have taken as long.
    What steps have not used up is lost, so that work never has more than one step's time at once. With no
    sequence to decode, work is free.

    Args:
        clock: the engine's clock.
        busy: whether sequences are decoding.
    """

    def __init__(self, clock: Callable[[], float], busy: Callable[[], bool]) -> None:
        self.clock = clock
        self._busy = busy
        self._balance = 0.0

    @property
    def open(self) -> bool:
        """True if a piece may run now."""
        return self._balance >= 0 or not self._busy()

    @property
    def seconds(self) -> float:
        """The time that a piece should take at most."""
        return max(self._balance, 0.0) if self._busy() else math.inf

    def earn(self, decoding: float, prompts: float) -> None:
        """Take the time of a step into account.

        Args:
            decoding: seconds of what the step decoded.
            prompts: seconds of the rows of prompts in it, which are work too.
        """
        left = max(decoding - prompts, 0.0)
        self._balance = min(self._balance + left, left)

    def spend(self, seconds: float) -> None:
        if self._busy():
            self._balance -= seconds

    @contextmanager
    def piece(self) -> Iterator[None]:
        began = self.clock()
        try:
            yield
        finally:
            self.spend(self.clock() - began)
