"""Suffix automaton over tokens, built incrementally, with a count of occurrences per n-gram.

Blumer, Blumer, Haussler, Ehrenfeucht, Chen, Seiferas 1985, The smallest automaton recognizing the subwords
of a text (Theoretical Computer Science 40). A state represents all n-grams that end at the same places of
the text; its link points to the state of their longest common suffix that ends at more places.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0


class SuffixAutomaton:
    """The n-grams of a growing text. Adding a token takes amortised constant time.

    Nothing can be removed, since one state represents every place where its n-grams occur.

    Counting an occurrence visits the states of the text's suffixes. A repetitive text has as many of them as
    repetitions, so only suffixes of up to ``counted`` tokens are visited.

    Args:
        counted: length in tokens of the longest n-grams whose counts are exact; at least 1.

    Attributes:
        size: number of tokens added.
        last: the state of the whole text.
    """

    def __init__(self, counted: int = 64) -> None:
        self.size = 0
        self.last = ROOT
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # length of each state's longest n-gram
        self._count = [0]
        self._counted = counted
        self._suffix = ROOT  # the state of the text's last ``counted`` tokens, or of all if there are fewer

    def __len__(self) -> int:
        """Number of states, at most twice the number of tokens."""
        return len(self._link)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        before, self.last = self.last, self._add({}, -1, self._length[self.last] + 1, 0)
        state = before
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = self.last
            state = self._link[state]
        self._link[self.last] = ROOT if state < 0 else self._exact(state, token)
        self._count_suffixes(token)
        self.size += 1

    def _add(self, follows: dict[int, int], link: int, length: int, count: int) -> int:
        self._next.append(follows)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._link) - 1

    def _exact(self, state: int, token: int) -> int:
        """The state of ``state``'s longest n-gram followed by the token, split off from longer n-grams."""
        whole = self._next[state][token]
        length = self._length[state] + 1
        if self._length[whole] == length:
            return whole
        part = self._add(dict(self._next[whole]), self._link[whole], length, self._count[whole])
        self._link[whole] = part
        while state >= 0 and self._next[state].get(token) == whole:
            self._next[state][token] = part
            state = self._link[state]
        return part

    def _count_suffixes(self, token: int) -> None:
        """Count one more occurrence of every suffix of the text of at most ``counted`` tokens."""
        length = min(self.size, self._counted)
        state = self._next[self.find(self._suffix, length)][token]
        self._suffix = self.find(state, min(length + 1, self._counted))
        state = self._suffix
        while state != ROOT:
            self._count[state] += 1
            state = self._link[state]

    # -- looking up ------------------------------------------------------------------------------------------

    def find(self, state: int, length: int) -> int:
        """The state of the last ``length`` tokens of a state's n-grams.

        Also valid for a state found before the text grew: its shorter n-grams may have been split off since.
        """
        while state != ROOT and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of an n-gram followed by a token that occurs: its state and its length.

        Called token by token, it maintains the longest suffix of another text that occurs in this one, in
        amortised constant time.

        Args:
            state: state of the n-gram.
            length: length of the n-gram, in tokens.
            token: the token that follows it.
        """
        state = self.find(state, length)
        while token not in self._next[state]:
            state = self._link[state]
            if state < 0:
                return ROOT, 0
            length = self._length[state]
        return self._next[state][token], length + 1

    def shorter(self, state: int) -> tuple[int, int]:
        """The longest suffix of a state's n-grams that occurs more often: its state and its length.

        For ``last``, the longest suffix of the text that occurs elsewhere in it; for the root, the root.
        """
        link = max(self._link[state], ROOT)
        return link, self._length[link]

    def followers(self, state: int) -> dict[int, int]:
        """The number of times that each token follows a state's n-grams."""
        return {token: self._count[below] for token, below in self._next[state].items()}

    def likeliest(self, state: int) -> int:
        """The token that follows a state's n-grams most often; -1 if none does."""
        follows = self._next[state]
        return max(follows, key=lambda token: self._count[follows[token]], default=-1)

    def count(self, state: int) -> int:
        """The number of occurrences of a state's n-grams of at most ``counted`` tokens."""
        return self._count[state]

    def after(self, state: int, token: int) -> int:
        """The state of a state's n-grams followed by a token that occurs after them."""
        return self._next[state][token]
