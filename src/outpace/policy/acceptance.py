"""How often drafted nodes stand, by their place in the draft: measured while decoding, with forgetting."""

from __future__ import annotations

from collections.abc import Sequence as Seq

_MEMORY = 16.0  # steps by which acceptance is remembered
_UNSEEN = 3.0  # steps by which it is of nodes that are not drafted any more
_LOOSE = 3.0  # steps that the past counts for in a trial
_DOUBT = 0.1  # steps that the assumed acceptance of nodes never tried counts for
_FORGOTTEN = 0.01  # steps that what is known of nodes counts for, below which it is forgotten
_REACH = 2  # widths past the widest tried that may be tried next


class Acceptance:
    """How many nodes a draft has and how many of them stand, by their place in the draft.

    A draft that is cut to its first nodes loses exactly what stood behind them, so one wide step tells of
    every narrower one. Places are counted in intervals between widths, and the past fades.

    Args:
        widths: the numbers of nodes told apart, ascending.
    """

    def __init__(self, widths: Seq[int]) -> None:
        self.widths = tuple(widths)
        self.sizes = [high - low for low, high in zip((0, *widths), widths, strict=False)]
        self._place = [place for place, size in enumerate(self.sizes) for _ in range(size)]
        self._tries: list[float] = [0.0] * len(self.sizes)
        self._hits = [0.0] * len(self.sizes)
        self._nodes = [0.0] * len(self.sizes)

    def observe(self, planned: int, drafted: Seq[int], paths: Seq[Seq[int]]) -> None:
        """What became of a step of a batch.

        Args:
            planned: nodes asked for, for each sequence.
            drafted: nodes of each sequence's draft.
            paths: the nodes of each draft that stood.
        """
        last, share = len(self._place), 1 / len(paths)
        longest = max(drafted)
        low = 0
        for place, high in enumerate(self.widths):
            tried = low < planned
            if not tried and not self._tries[place]:
                break  # nor are those further on known: they are tried no more often
            keep = 1 - 1 / (_MEMORY if tried else _UNSEEN)
            self._tries[place] = self._tries[place] * keep + tried
            self._hits[place] *= keep
            # A forward is as wide as the longest draft of the batch.
            self._nodes[place] = self._nodes[place] * keep + max(0, min(longest, high) - low) * tried
            if self._tries[place] < _FORGOTTEN:
                self._tries[place] = self._hits[place] = self._nodes[place] = 0.0
            low = high
        for path in paths:
            for node in path:
                if node < last:
                    self._hits[self._place[node]] += share

    def loosen(self) -> None:
        """Remember the past as a few steps' worth, so that what comes next counts for more."""
        factor = min(1.0, _LOOSE / max(1.0, *self._tries))
        self._tries = [value * factor for value in self._tries]
        self._hits = [value * factor for value in self._hits]
        self._nodes = [value * factor for value in self._nodes]

    def expected(self) -> list[tuple[int, float, float]]:
        """For each width within reach: itself, nodes that stand below it, share of its last nodes there are.

        Nodes never tried are taken to be there like those before them. Of the very first, one in two stands;
        of two in a row, the second stands less often by the root of the first's chance, which is more than
        independent guesses would, since some texts are easier than others.
        """
        found: list[tuple[int, float, float]] = []
        total, assumed, there, ratio = 0.0, 1 - 0.5 ** self.sizes[0], 1.0, 1.0
        reach = _REACH - 1 + sum(tries > 0 for tries in self._tries)
        for place, size in enumerate(self.sizes[: reach + 1]):
            weight = self._tries[place] + _DOUBT
            stand = (self._hits[place] + _DOUBT * assumed) / weight
            there = (self._nodes[place] / size + _DOUBT * there) / weight
            total += stand
            found.append((self.widths[place], total, there))
            if place == 0:
                ratio = min(1.0, stand) ** 0.5
            if place + 1 < len(self.sizes):
                further = self.sizes[place + 1]
                assumed = stand / size * ratio ** ((size + further) / 2) * further
        return found
