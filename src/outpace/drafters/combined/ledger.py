"""Rates of right guesses: counts by drafters, depth and place among siblings, with forgetting."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import repeat
from typing import NamedTuple

from outpace.core import Draft

_DEPTHS, _RANKS = 12, 8  # what is deeper, or further among its siblings, is counted with the last
_GRADES = 8  # chances told apart where guessers state them
_FORGET = 0.96  # what an observation counts for, after each later one of its kind
_DOUBT = 2.0  # observations that the first guess of a chance counts for

Cell = list[float]  # right, judged


class Guesses(NamedTuple):
    """A tree of guesses and who guesses each.

    Attributes:
        tokens, parents: the tree; -1 is the root, and parents come first.
        guessers: of each node, those who guess it: a number whose bit i is guesser i's.
        stated: the chance they give it where its parent is right; 0 where they do not say.
    """

    tokens: Seq[int] = ()
    parents: Seq[int] = ()
    guessers: Seq[int] = ()
    stated: Seq[float] = ()

    @classmethod
    def merged(cls, drafts: Seq[Draft]) -> tuple[Guesses, list[list[int]]]:
        """One tree of the guesses of several drafters, and for each draft the map from its nodes to the
        tree's.

        Of several stated chances the highest counts.

        Args:
            drafts: one of each guesser.

        Raises:
            ValueError: a draft brings distributions (its siblings are trials of their own).
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
    """The chance that a draft states of each node, where its parent is right; 0 where it does not say."""
    chances = draft.chances
    if chances is None:
        return repeat(0.0, len(draft))
    under = zip(chances, draft.parents, strict=True)
    return [chance / chances[parent] if parent >= 0 else chance for chance, parent in under]


class Ledger:
    """The rates at which guesses are right, given right parents.

    What two guessers agree on is right more often than what one says against the other, and how much more is
    not known beforehand: so each set of guessers is counted apart. Guesses whose chance is stated are counted
    by it, others by their place among their siblings.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, int], Cell] = {}

    def worth(self, guesses: Guesses) -> list[float]:
        """The chance of each node that it is right, and all on the way to it."""
        found: list[float] = []
        # node -> the depth of its children, and how many there were; the root's are the last.
        depth, ranks = [0] * (len(guesses.parents) + 1), [0] * (len(guesses.parents) + 1)
        for node, parent in enumerate(guesses.parents):
            right, judged = self._cell(guesses, node, depth[parent], ranks[parent])
            found.append((found[parent] if parent >= 0 else 1.0) * right / judged)
            depth[node] = depth[parent] + 1
            ranks[parent] += 1
        return found

    def note(self, guesses: Guesses, text: Seq[int]) -> None:
        """Judge the nodes whose parents were right, by the text that came in the tree's place.

        Of what follows the last token of the text nothing is known yet.

        Args:
            text: the tokens that came after the root.
        """
        depth, ranks = {-1: 0}, {-1: 0}  # as in ``worth``, of the nodes that were right
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
        # A stated chance is the first estimate; otherwise a first child is taken to be right half the time, a
        # second one a third of it, and so on.
        stated = guesses.stated[node]
        grade = -1 - int(_GRADES * stated) if stated else min(rank, _RANKS - 1)
        place = (guesses.guessers[node], min(depth, _DEPTHS - 1), grade)
        cell = self._cells.get(place)
        if cell is None:
            cell = self._cells[place] = [_DOUBT * (stated or 1 / (2 + rank)), _DOUBT]
        return cell
