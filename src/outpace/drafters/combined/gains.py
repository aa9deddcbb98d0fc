"""Gains of the parts of ``combined``: what their drafts add, against the time that they take."""

from __future__ import annotations

from collections import deque

_FORGET = 0.98  # decay of an observation's weight per later observation
_HOPE, _DOUBT = 0.5, 20.0  # tokens that a part is assumed to add per step, and the weight of this in steps
_GRADES = 8  # number of intervals of the chance that earlier parts state
_KEPT = 9  # latest times kept per part


class Gains:
    """Measured gains and times of the parts.

    Over many steps, decoding emits the most tokens per time if a part drafts whenever it adds more tokens per
    time than decoding emits on average. What it adds depends on how sure the parts before it are, so it is
    measured separately for each interval of their best chance.
    """

    def __init__(self) -> None:
        self._added: dict[tuple[int, int], list[float]] = {}  # part and grade -> tokens, steps
        self._seconds: dict[int, deque[float]] = {}
        self._tokens, self._time = 1.0, 1.0  # of recent steps; time in plain steps

    @property
    def speed(self) -> float:
        """Tokens per plain step's time; at least 1, which plain decoding has."""
        return max(1.0, self._tokens / self._time)

    def pays(self, part: int, chance: float, plain: float) -> bool:
        """True if a part's draft adds more than it costs, or if its time is not measured yet.

        Args:
            chance: the best chance that a part before it states; 0 if none does.
            plain: seconds of a plain step.
        """
        tokens, steps = self._cell(part, chance)
        return tokens / steps >= self.speed * self.cost(part) / plain

    def took(self, part: int, seconds: float) -> None:
        self._seconds.setdefault(part, deque(maxlen=_KEPT)).append(seconds)

    def cost(self, part: int) -> float:
        """Seconds of a part's draft, the lower median of the latest; 0 if not measured."""
        known = sorted(self._seconds.get(part, (0.0,)))
        return known[(len(known) - 1) // 2]

    def added(self, part: int, chance: float, tokens: float) -> None:
        """Note how many tokens a part's draft is expected to add to a step, net of their rows' time."""
        cell = self._cell(part, chance)
        cell[:] = cell[0] * _FORGET + tokens, cell[1] * _FORGET + 1

    def step(self, tokens: int, time: float) -> None:
        self._tokens += (1 - _FORGET) * (tokens - self._tokens)
        self._time += (1 - _FORGET) * (time - self._time)

    def _cell(self, part: int, chance: float) -> list[float]:
        return self._added.setdefault((part, int(_GRADES * chance)), [_HOPE * _DOUBT, _DOUBT])
