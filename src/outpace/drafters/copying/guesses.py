"""Guesses of the token after the root, from the logits that the root was chosen from (LogitSpec).

Liu et al. 2025, arXiv 2507.01449, section 3: the other best tokens of these logits are likely to come next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST, _FALL = 0.15, 0.6  # assumed chance of the best guess, and that of each further one, relative to it
_DOUBT = 4.0  # weight of these, in steps
_KEEP = 0.98  # share of earlier steps' weight that a further one leaves


@dataclass
class NextGuesses:
    """The guesses, the best first, and how often those of each rank were right."""

    tokens: list[int] = field(default_factory=list)
    _right: list[float] = field(default_factory=list)
    _counted: float = 0.0

    def chance(self, rank: int) -> float:
        right = self._right[rank] if rank < len(self._right) else 0.0
        return (right + _DOUBT * _FIRST * _FALL**rank) / (self._counted + _DOUBT)

    def count(self, token: int) -> None:
        if not self.tokens:
            return
        self._right += [0.0] * (len(self.tokens) - len(self._right))
        self._counted = self._counted * _KEEP + 1
        self._right = [
            right * _KEEP + (rank < len(self.tokens) and self.tokens[rank] == token)
            for rank, right in enumerate(self._right)
        ]
