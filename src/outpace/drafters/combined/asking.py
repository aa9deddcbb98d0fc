"""Decision whether a part of ``combined`` drafts: what its drafts add, against the time that they take."""

from __future__ import annotations

_FORGET = 0.98  # decay of an observation's weight per later observation
_HOPE, _DOUBT = 0.5, 20.0  # tokens that a part is assumed to add per step, and the weight of this in steps
_GRADES = 8  # number of intervals of the chance that earlier parts state
_MOVE = 0.05  # share by which an observation moves a time up or down


class Asking:
    """Measured gains and times of the parts.

    Over many steps, decoding emits the most tokens per time if a part drafts whenever it adds more tokens per
    time than decoding emits on average. What it adds depends on how sure the parts before it are, so it is
    measured separately for each interval of their best chance.
    """

    def __init__(self) -> None:
        self._added: dict[tuple[int, int], list[float]] = {}  # part and grade -> tokens, steps
        self._seconds: dict[int, float] = {}  # part -> median seconds of a draft
        self._tokens, self._time = 1.0, 1.0  # of recent steps; time in plain steps

    @property
    def speed(self) -> float:
        """Tokens per plain step's time; at least 1, which plain decoding has."""
        return max(1.0, self._tokens / self._time)

    def pays(self, part: int, chance: float, plain: float) -> bool:
        """True if a part's draft adds more than it costs.

        Args:
            chance: the best chance that a part before it states; 0 if none does.
            plain: seconds of a plain step.
        """
        tokens, steps = self._cell(part, chance)
        return tokens / steps >= self.speed * self.cost(part) / plain

    def took(self, part: int, seconds: float) -> None:
        """Note the time of a draft. Their median is estimated, since some include an interruption."""
        known = min(self._seconds.get(part, seconds), 2 * seconds)
        self._seconds[part] = known * (1 + _MOVE if seconds > known else 1 - _MOVE)

    def cost(self, part: int) -> float:
        """Seconds of a part's draft; 0 if not measured."""
        return self._seconds.get(part, 0.0)

    def added(self, part: int, chance: float, tokens: float) -> None:
        """Note how many tokens a part's draft is expected to add to a step, net of their rows' time."""
        cell = self._cell(part, chance)
        cell[:] = cell[0] * _FORGET + tokens, cell[1] * _FORGET + 1

    def step(self, tokens: int, time: float) -> None:
        """Note a step's tokens, and its time in plain steps."""
        self._tokens += (1 - _FORGET) * (tokens - self._tokens)
        self._time += (1 - _FORGET) * (time - self._time)

    def _cell(self, part: int, chance: float) -> list[float]:
        return self._added.setdefault((part, int(_GRADES * chance)), [_HOPE * _DOUBT, _DOUBT])
