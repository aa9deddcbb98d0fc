"""Acceptance of drafted nodes by their place in the draft, measured while decoding, with forgetting."""

from __future__ import annotations

from collections.abc import Sequence as Seq

_MEMORY = 16.0  # steps by which acceptance is remembered
_PRIOR = 0.1  # steps that the assumed acceptance of nodes never tried counts for
_REACH = 2  # widths past the widest tried that may be tried next


class Acceptance:
    """Counts of nodes drafted and accepted, by their place in the draft.

    A draft that is cut to its first nodes loses exactly the acceptances behind the cut, so one wide step
    tells of every narrower one. Places are counted in intervals between widths, and the past fades.

    Args:
        widths: the numbers of nodes told apart, ascending.
    """

    def __init__(self, widths: Seq[int]) -> None:
        self.widths = tuple(widths)
        # Interval i holds the nodes widths[i - 1] .. widths[i] - 1.
        self.sizes = [high - low for low, high in zip((0, *widths), widths, strict=False)]
        self._interval = [place for place, size in enumerate(self.sizes) for _ in range(size)]
        self._tries: list[float] = [0.0] * len(self.sizes)
        self._hits = [0.0] * len(self.sizes)
        self._nodes = [0.0] * len(self.sizes)

    def observe(self, planned: int, drafted: Seq[int], paths: Seq[Seq[int]]) -> None:
        """Count a step of a batch.

        Args:
            planned: nodes asked for, for each sequence.
            drafted: nodes of each sequence's draft.
            paths: the accepted nodes of each draft.
        """
        last, share, keep = len(self._interval), 1 / len(paths), 1 - 1 / _MEMORY
        longest = max(drafted)
        low = 0
        for place, high in enumerate(self.widths):
            tried = low < planned
            if not tried and not self._tries[place]:
                break  # nor were those further on: they are tried no more often
            self._tries[place] = self._tries[place] * keep + tried
            self._hits[place] *= keep
            # A forward is as wide as the longest draft of the batch.
            self._nodes[place] = self._nodes[place] * keep + max(0, min(longest, high) - low) * tried
            low = high
        for path in paths:
            for node in path:
                if node < last:
                    self._hits[self._interval[node]] += share

    def expected(self) -> list[tuple[int, float, float]]:
        """For each width within reach: itself, nodes accepted below it, share of its last nodes that exist.

        Nodes never tried are taken to exist like those before them. Of the very first, one in two is
        accepted; of two in a row, the second is accepted less often by the root of the first's chance, which
        is more than independent guesses would be, since some texts are easier than others.
        """
        found: list[tuple[int, float, float]] = []
        total, assumed, there, ratio = 0.0, 1 - 0.5 ** self.sizes[0], 1.0, 1.0
        reach = _REACH - 1 + sum(tries > _PRIOR for tries in self._tries)
        for place, size in enumerate(self.sizes[: reach + 1]):
            weight = self._tries[place] + _PRIOR
            accepted = (self._hits[place] + _PRIOR * assumed) / weight
            there = (self._nodes[place] / size + _PRIOR * there) / weight
            total += accepted
            found.append((self.widths[place], total, there))
            if place == 0:
                ratio = min(1.0, accepted) ** 0.5
            if place + 1 < len(self.sizes):
                further = self.sizes[place + 1]
                assumed = accepted / size * ratio ** ((size + further) / 2) * further
        return found
