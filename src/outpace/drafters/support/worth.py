"""What a further row of a draft is worth: rates of right guesses, tokens per time, the time of a forward."""

from __future__ import annotations

import math
from collections import deque

_KEEP = 0.98  # share of earlier observations' weight that a new one leaves
_DOUBT = 2.0  # weight, in guesses, of the assumption that stated confidences are right
_USUAL, _WEIGHT = 0.8, 4.0  # rate of right guesses that is assumed at first, and its weight, in guesses
_FINEST = 1 / 256  # chance of a wrong guess below which confidences are counted together
_LEVELS, _PANEL = 8, 64  # sizes of a head that are tried, multiples of some outputs
_RECENT, _UNSEEN = (
    0.999,
    50.0,
)  # share of a text's weight that a further token leaves; weight of the first doubt
_KEPT = 9  # latest times kept


class Lately:
    """The time of something, by its latest few measurements."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """The lower median; 0 if not measured."""
        known = sorted(self._seconds) or [0.0]
        return known[(len(known) - 1) // 2]


class DraftSpeed:
    """Tokens per time of recent steps.

    Over many steps decoding emits the most tokens per time if a row is added whenever it adds more tokens per
    time than decoding emits on average.
    """

    def __init__(self) -> None:
        self._tokens, self._time = 1.0, 1.0  # time in plain steps

    @property
    def tokens(self) -> float:
        """Tokens per plain step's time; at least 1, which plain decoding has."""
        return max(1.0, self._tokens / self._time)

    @property
    def a_step(self) -> float:
        return self._tokens

    def step(self, tokens: int, time: float) -> None:
        self._tokens += (1 - _KEEP) * (tokens - self._tokens)
        self._time += (1 - _KEEP) * (time - self._time)


class Rates:
    """Rates of right guesses, given a right parent, by rank among siblings and by stated confidence.

    Attributes:
        usual: the rate of first guesses of any confidence.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], list[float]] = {}  # right, judged
        self._all = [_USUAL * _WEIGHT, _WEIGHT]

    @property
    def usual(self) -> float:
        return self._all[0] / self._all[1]

    def chance(self, rank: int, stated: float) -> float:
        """The probability of a guess whose confidence, in [0, 1], is stated."""
        right, judged = self._cells.get(_place(rank, stated), (0.0, 0.0))
        return (right + _DOUBT * stated) / (judged + _DOUBT)

    def count(self, rank: int, stated: float, right: bool) -> None:
        cell = self._cells.setdefault(_place(rank, stated), [0.0, 0.0])
        cell[:] = cell[0] * _KEEP + right, cell[1] * _KEEP + 1
        if not rank:
            self._all[:] = self._all[0] * _KEEP + right, self._all[1] * _KEEP + 1


class Missed:
    """The rate of tokens that a cut head does not predict, and whether it is worth the head's time."""

    def __init__(self) -> None:
        self._missed, self._seen = 1.0, _UNSEEN

    def count(self, missed: int, tokens: int) -> None:
        """Count tokens of a text, and how many of them were not predicted."""
        keep = _RECENT**tokens
        self._missed, self._seen = self._missed * keep + missed, self._seen * keep + tokens

    def pays(self, saved: float, tokens: float) -> bool:
        """True if less is lost than saved: a token that is not predicted ends a draft, usually in its middle.

        Args:
            saved: time per drafted row, in tokens.
            tokens: emitted per step.
        """
        return self._missed / self._seen * tokens / 2 < saved


def _place(rank: int, stated: float) -> tuple[int, int]:
    """The cell of a confidence: half an octave of the chance that the guess is wrong."""
    return rank, int(-2 * math.log2(max(1 - stated, _FINEST)))
