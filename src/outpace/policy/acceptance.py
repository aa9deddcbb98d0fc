"""Acceptance rates of drafted nodes by their place in the draft, measured while decoding, with decay."""

from __future__ import annotations

from collections.abc import Sequence as Seq

_MEMORY = 16.0  # time constant of the decay, in steps
_UNTRIED = 4.0  # the same for nodes that were not drafted, so that a few failures do not keep drafts narrow
_PRIOR = 0.1  # weight, in steps, of the assumed acceptance of nodes never tried
_REACH = 2  # number of widths above the widest tried one that may be tried next


class Acceptance:
    """Counts of nodes drafted and accepted, by their place in the draft.

    A draft that is cut to its first nodes loses exactly the acceptances after the cut, so one wide step
    measures every narrower one. Nodes are counted per interval between widths; old counts decay.

    Args:
        widths: numbers of nodes to distinguish, ascending.
    """

    def __init__(self, widths: Seq[int]) -> None:
        self.widths = tuple(widths)
        # Interval i contains the nodes widths[i - 1] .. widths[i] - 1.
        self.sizes = [high - low for low, high in zip((0, *widths), widths, strict=False)]
        self._interval = [place for place, size in enumerate(self.sizes) for _ in range(size)]
        self._tries: list[float] = [0.0] * len(self.sizes)
        self._hits = [0.0] * len(self.sizes)
        self._nodes = [0.0] * len(self.sizes)

    def observe(self, planned: int, drafted: Seq[int], paths: Seq[Seq[int]]) -> None:
        """Count a step of a batch.

        Args:
            planned: number of nodes planned per sequence.
            drafted: number of nodes of each sequence's draft.
            paths: the accepted nodes of each draft.
        """
        last, share = len(self._interval), 1 / len(paths)
        longest = max(drafted)
        low = 0
        for place, high in enumerate(self.widths):
            tried = low < planned
            if not tried and not self._tries[place]:
                break  # wider intervals have not been tried either
            keep = 1 - 1 / (_MEMORY if tried else _UNTRIED)
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
        """Expected acceptance for each width that was tried or may be tried next.

        Intervals never tried are assumed to exist as often as those before them. A first node never tried is
        assumed to be accepted half the time. From one node to the next, acceptance is assumed to fall by the
        square root of the first node's rate: less than for independent guesses, since texts differ in
        difficulty.

        Returns:
            Tuples of a width, the expected number of accepted nodes below it, and the share of nodes of its
            last interval that exist.
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
