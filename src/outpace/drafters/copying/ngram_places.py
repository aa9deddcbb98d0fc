"""Index of a fixed text: the places of every n-gram, from which a copy may continue."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class NgramPlaces:
    """The places of all n-grams of a text, in order. Look-ups take time independent of the text's length.

    A place is the index of the token that follows an n-gram; the n-gram at the end of the text has none.

    Args:
        text: token ids.
        max_ngram: the longest n-grams that are indexed, at least 1.
    """

    def __init__(self, text: Sequence[int], max_ngram: int) -> None:
        self._sizes = range(max_ngram, 0, -1)
        self._places: dict[tuple[int, ...], list[int]] = {}
        for place in range(1, len(text)):
            for size in range(1, min(max_ngram, place) + 1):
                self._places.setdefault(tuple(text[place - size : place]), []).append(place)

    def longest(self, tokens: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The longest n-gram at the end of ``tokens`` that occurs in the text: its length and its places.

        The length is 0 if not even the last token occurs.
        """
        for size in self._sizes:
            if size <= len(tokens):
                places = self._places.get(tuple(tokens[-size:]))
                if places is not None:
                    return size, places
        return 0, ()


def nearest(places: Sequence[int], cursor: int) -> int:
    """The first of the sorted places at or after ``cursor``; if there is none, the last one before it."""
    return places[min(bisect_left(places, cursor), len(places) - 1)]
