"""Bounded memory of texts as suffix automata; the oldest texts are dropped first."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.drafters.copying.suffix_automaton import ROOT, SuffixAutomaton

GENERATIONS = 8
BEGIN = -1  # precedes each text; not a token, so no n-gram of tokens extends from one text into the next


class SuffixMemory:
    """The latest texts, up to a number of tokens.

    Nothing can be removed from an automaton, so there are several, each for an eighth of the tokens. Texts
    are added to the newest; when it is full, a new one is begun and the oldest is dropped as a whole. With
    one automaton per text the limit would be finer, but look-ups would have to visit all of them.

    Args:
        tokens: maximum number of tokens over all texts; about 500 bytes each. 0 keeps nothing.
        counted: length of the longest n-grams whose counts are exact.

    Attributes:
        blocks: the automata, the oldest first.
    """

    def __init__(self, tokens: int, counted: int) -> None:
        self.blocks: list[SuffixAutomaton] = []
        self._size = tokens // GENERATIONS
        self._counted = counted

    def __len__(self) -> int:
        """Number of tokens kept, the separators between texts included."""
        return sum(block.size for block in self.blocks)

    def add(self, text: Sequence[int]) -> None:
        """Add a text; of one longer than an eighth of the memory, only the end."""
        text = text[max(0, len(text) - self._size + 1) :]
        if not text or self._size < 2:
            return
        if not self.blocks or self.blocks[-1].size + 1 + len(text) > self._size:
            self.blocks.append(SuffixAutomaton(self._counted))
            del self.blocks[:-GENERATIONS]
        self.blocks[-1].append(BEGIN)
        self.blocks[-1].extend(text)


class Cursor:
    """The longest suffix of a growing text that occurs in an automaton.

    It stays one that occurs while the automaton grows, but there may be a longer one then.

    Args:
        longest: maximum length in tokens.
        text: the text so far, of which the last ``longest`` tokens are looked up.

    Attributes:
        size: the automaton's when this was made.
        state: the suffix's state in the automaton.
        length: its length in tokens, at most ``longest``.
    """

    def __init__(self, automaton: SuffixAutomaton, longest: int, text: Sequence[int] = ()) -> None:
        self.size = automaton.size
        self.state = ROOT
        self.length = 0
        self._automaton = automaton
        self._longest = longest
        for token in text[max(0, len(text) - longest) :]:
            self.append(token)

    def append(self, token: int) -> None:
        self.state, self.length = self._automaton.follow(self.state, self.length, token)
        if self.length > self._longest:
            self.length = self._longest
            self.state = self._automaton.find(self.state, self.length)
