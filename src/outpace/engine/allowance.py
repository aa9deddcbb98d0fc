"""Time for work of single requests beside the steps of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Allowance:
    """The time that may go to work beside steps: no more than the steps spend on decoding.

    Work is what one request needs and others wait for: images and sources to encode, texts to score, rows to
    copy, a drafter's first look at a prompt. It is cut into pieces. A piece may run while the work is not
    ahead of the steps; one that takes longer than it may delays the next, until steps have taken as long.
    What steps have not used up is lost, so that work never has more than one step's time at once. With no
    sequence to decode, work is free.
    """

    def __init__(self, clock: Callable[[], float], busy: Callable[[], bool]) -> None:
        self.clock = clock
        self._busy = busy
        self._balance = 0.0

    @property
    def open(self) -> bool:
        return self._balance >= 0 or not self._busy()

    @property
    def seconds(self) -> float:
        """The time that a piece should take at most."""
        return max(self._balance, 0.0) if self._busy() else math.inf

    def earn(self, decoding: float, prompts: float) -> None:
        """Take the time of a step into account.

        Args:
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
