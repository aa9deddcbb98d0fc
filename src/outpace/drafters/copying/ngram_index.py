"""Index of a growing text: the places of every n-gram, updated incrementally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Occurrence(NamedTuple):
    """An earlier occurrence of the text's last ``length`` tokens; ``place`` is the token that followed it."""

    length: int
    place: int


class NgramIndex:
    """The places of all n-grams of a text. Updates and look-ups take time independent of its length.

    Args:
        tokens: the text; it is not copied, and may grow.
        max_ngram: the longest n-grams that are indexed, at least 1.
        min_ngram: the shortest, from 1 to ``max_ngram``.
    """

    def __init__(self, tokens: Sequence[int], max_ngram: int, min_ngram: int = 1) -> None:
        self._tokens = tokens
        self._sizes = range(min_ngram, max_ngram + 1)
        # Most n-grams occur once: their one place needs no list.
        self._places: dict[tuple[int, ...], int | list[int]] = {}
        self._known: list[int] = []  # the indexed tokens

    @property
    def _read(self) -> int:
        return len(self._known)

    def update(self) -> None:
        read, places = self._read, self._places
        first = max(0, read + 1 - self._sizes[-1])  # first token of the longest n-gram that ends in a new one
        tail = tuple(self._tokens[first:])
        for end in range(read + 1, first + len(tail) + 1):
            for size in self._sizes:
                if size > end:
                    break
                ngram = tail[end - size - first : end - first]
                before = places.setdefault(ngram, end)
                if before == end:
                    continue
                if isinstance(before, int):
                    places[ngram] = [before, end]
                else:
                    before.append(end)
        self._known += tail[read - first :]

    def revise(self, unchanged: int) -> None:
        """Update the index after all but the first ``unchanged`` tokens of the text were replaced."""
        for end in range(self._read, unchanged, -1):
            for size in self._sizes:
                if size > end:
                    break
                ngram = tuple(self._known[end - size : end])
                places = self._places[ngram]
                if isinstance(places, int):
                    del self._places[ngram]
                else:
                    places.pop()  # the last place is the latest
        del self._known[unchanged:]
        self.update()

    def matches(self, limit: int) -> list[Occurrence]:
        """At most ``limit`` earlier occurrences of the text's end: the longest first, then the latest.

        Raises:
            ValueError: the text has grown since the last ``update``.
        """
        tokens, end = self._tokens, len(self._tokens)
        if end != self._read:
            raise ValueError(f"the text has {end} tokens but the index {self._read}: call update first")
        found: dict[int, Occurrence] = {}
        for size in reversed(self._sizes):
            if size > end:
                continue
            # The last place is the text's own end. A longer match's places are also among a shorter one's.
            places = self._places[tuple(tokens[-size:])]
            for place in () if isinstance(places, int) else reversed(places):
                if len(found) >= limit:
                    return list(found.values())
                if place < end and place not in found:
                    found[place] = Occurrence(size, place)
        return list(found.values())

    def follow(self, match: Occurrence, depth: int) -> int:
        """The token ``depth`` places after a match, 0 for the next one.

        A continuation that reaches the end of the text continues from its own beginning: the text is taken to
        be periodic.
        """
        return self._tokens[match.place + depth % (self._read - match.place)]
