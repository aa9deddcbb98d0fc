"""Rates of right guesses by drafters, depth and rank among siblings, with decay."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import repeat
from typing import NamedTuple

from outpace.core import Draft
from outpace.drafters.combined.gains import Gains

_DEPTHS, _RANKS = 12, 8  # greater depths and ranks are counted with the last ones
_GRADES = 8  # number of intervals of stated chances
_FORGET = 0.96  # decay of an observation's weight per later observation in its cell
_DOUBT = 2.0  # weight of a chance's prior, in observations

Cell = list[float]  # right, judged


class Guesses(NamedTuple):
    """A tree of guesses, and the drafters that made each.

    Attributes:
        tokens, parents: the tree; -1 is the root, and parents come first.
        guessers: per node, a number whose bit i is set if drafter i guessed it.
        stated: per node, its stated chance given a right parent; 0 if none is stated.
    """

    tokens: Seq[int] = ()
    parents: Seq[int] = ()
    guessers: Seq[int] = ()
    stated: Seq[float] = ()

    @classmethod
    def merged(cls, drafts: Seq[Draft]) -> tuple[Guesses, list[list[int]]]:
        """Merge the drafts of several drafters.

        Of several stated chances the highest is used.

        Args:
            drafts: one per drafter.

        Returns:
            The tree, and for each draft the map from its nodes to the tree's.

        Raises:
            ValueError: a draft has distributions (its siblings are separate trials).
        """
        tokens: list[int] = []
        parents: list[int] = []
        guessers: list[int] = []
        stated: list[float] = []
        known: dict[tuple[int, int], int] = {}  # parent and token -> node
        maps: list[list[int]] = []
        for guesser, draft in enumerate(drafts):
            if draft.distributions is not None:
                raise ValueError(
                    "a draft that was sampled cannot be merged: its equal siblings are separate draws"
                )
            nodes: list[int] = []
            for token, parent, chance in zip(draft.tokens, draft.parents, _given(draft), strict=True):
                under = nodes[parent] if parent >= 0 else -1
                node = known.setdefault((under, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(under)
                    guessers.append(0)
                    stated.append(0.0)
                guessers[node] |= 1 << guesser
                stated[node] = max(stated[node], chance)
                nodes.append(node)
            maps.append(nodes)
        return cls(tokens, parents, guessers, stated), maps


def _given(draft: Draft) -> Iterable[float]:
    """The chance that a draft states for each node given a right parent; 0 if it states none."""
    chances = draft.chances
    if chances is None:
        return repeat(0.0, len(draft))
    under = zip(chances, draft.parents, strict=True)
    return [min(chance / chances[parent], 1.0) if parent >= 0 else chance for chance, parent in under]


class Ledger:
    """The rates at which guesses are right, given right parents.

    Guesses on which two drafters agree are right more often than others, by a margin that is not known in
    advance, so each set of drafters is counted separately. Guesses with a stated chance are counted by it,
    others by their rank among their siblings.

    Attributes:
        gains: what the drafters add to each other's guesses, and their times.
    """

    def __init__(self) -> None:
        self.gains = Gains()
        self._cells: dict[tuple[int, int, int], Cell] = {}

    def worth(self, guesses: Guesses) -> list[float]:
        """The probability of each node that it and all its ancestors are right."""
        found: list[float] = []
        # Per node, the depth of its children and their number so far; the root is the last entry.
        depth, ranks = [0] * (len(guesses.parents) + 1), [0] * (len(guesses.parents) + 1)
        for node, parent in enumerate(guesses.parents):
            right, judged = self._cell(guesses, node, depth[parent], ranks[parent])
            # The quotient first, which is at most 1: rounding must not make a child likelier than its parent.
            found.append((found[parent] if parent >= 0 else 1.0) * (right / judged))
            depth[node] = depth[parent] + 1
            ranks[parent] += 1
        return found

    def note(self, guesses: Guesses, text: Seq[int]) -> None:
        """Count the nodes with right parents as right or wrong, by the text emitted after the root.

        Nodes beyond the end of the text are not counted.

        Args:
            text: the tokens after the root.
        """
        depth, ranks = {-1: 0}, {-1: 0}  # as in ``worth``, for the nodes that were right
        for node, parent in enumerate(guesses.parents):
            place = depth.get(parent, len(text))
            if place < len(text):
                hit = guesses.tokens[node] == text[place]
                cell = self._cell(guesses, node, place, ranks[parent])
                cell[0] = cell[0] * _FORGET + hit
                cell[1] = cell[1] * _FORGET + 1
                ranks[parent] += 1
                if hit:
                    depth[node], ranks[node] = place + 1, 0

    def _cell(self, guesses: Guesses, node: int, depth: int, rank: int) -> Cell:
        # The prior is the stated chance; without one, 1/2 for a first child, 1/3 for a second, and so on.
        stated = guesses.stated[node]
        grade = -1 - int(_GRADES * stated) if stated else min(rank, _RANKS - 1)
        place = (guesses.guessers[node], min(depth, _DEPTHS - 1), grade)
        cell = self._cells.get(place)
        if cell is None:
            cell = self._cells[place] = [_DOUBT * (stated or 1 / (2 + rank)), _DOUBT]
        return cell
