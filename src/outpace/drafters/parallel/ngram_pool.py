"""Pool of n-grams keyed by their first token, with least recently seen eviction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class NgramPool:
    """At most ``capacity`` continuations of ``length`` tokens per first token.

    Args:
        length: tokens after the first one, n - 1 for n-grams.
        capacity: continuations kept per first token.
    """

    def __init__(self, length: int, capacity: int) -> None:
        self.length = length
        self.capacity = capacity
        # A dict keeps the order of insertion: oldest first.
        self._entries: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first: int, rest: Iterable[int]) -> None:
        """Add an n-gram, or move it to the most recent place."""
        entry = self._entries.setdefault(first, {})
        ngram = tuple(rest)
        entry.pop(ngram, None)
        entry[ngram] = None
        if len(entry) > self.capacity:
            del entry[next(iter(entry))]

    def add_text(self, tokens: Sequence[int], start: int = 0) -> None:
        """Add every n-gram of a text that begins at token ``start`` or later."""
        for place in range(max(start, 0), len(tokens) - self.length):
            self.add(tokens[place], tokens[place + 1 : place + 1 + self.length])

    def get(self, first: int) -> list[tuple[int, ...]]:
        """Continuations of a token, the most recent first."""
        return list(reversed(self._entries.get(first, ())))

    def __len__(self) -> int:
        return sum(len(entry) for entry in self._entries.values())
