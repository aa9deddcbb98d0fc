"""How often guesses were right: counts by who guessed, depth and place among siblings, with forgetting."""

from __future__ import annotations

from collections.abc import Sequence as Seq

_DEPTHS, _RANKS = 12, 8  # what is deeper, or further among its siblings, is counted with the last
_FORGET = 0.96  # what an observation counts for, after each later one of its kind
_DOUBT = 2.0  # observations that the first guess of a chance counts for


class Ledger:
    """How often the nodes that each part drafts are right where their parents are.

    Args:
        parts: how many drafters are measured.
    """

    def __init__(self, parts: int) -> None:
        # At first: a node's first child is right half the time, the second a third of the time, and so on.
        cells = [[_DOUBT / (2 + rank), _DOUBT] for rank in range(_RANKS)]
        self._counts = [[[list(cell) for cell in cells] for _ in range(_DEPTHS)] for _ in range(parts)]

    def chance(self, part: int, depth: int, rank: int) -> float:
        """That a node is right where its parent is. Depth 0 is under the root, rank 0 the first child."""
        right, judged = self._counts[part][min(depth, _DEPTHS - 1)][min(rank, _RANKS - 1)]
        return right / judged

    def note(self, part: int, tokens: Seq[int], parents: Seq[int], text: Seq[int]) -> None:
        """Judge the nodes of a tree whose parents were right, by the text that came in its place.

        Of what follows the last token of the text nothing is known yet.

        Args:
            tokens, parents: the tree; -1 is the root, and parents come first.
            text: the tokens that came after the root.
        """
        right = {-1: 0}  # node -> the depth of its children
        ranks = {-1: 0}  # node -> how many of its children were judged
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            depth = right.get(parent, len(text))
            if depth < len(text):
                hit = token == text[depth]
                rank = ranks[parent]
                cell = self._counts[part][min(depth, _DEPTHS - 1)][min(rank, _RANKS - 1)]
                cell[0] = cell[0] * _FORGET + hit
                cell[1] = cell[1] * _FORGET + 1
                ranks[parent] = rank + 1
                if hit:
                    right[node], ranks[node] = depth + 1, 0
