"""Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).

The tokens that followed earlier occurrences of the last few tokens, in the prompt or the output, are drafted;
or those in the source of an encoder-decoder model, if its encoder and decoder share a vocabulary. This needs
no model and no training, and works where answers quote their prompt or themselves.

Differences from the original, which takes the first match of one length and drafts the same number of tokens
after weak and strong matches: several matches are followed at once and merged into a tree, each guess is
weighted by the lengths of the matches that support it, and only guesses likely enough are drafted.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from outpace.core import Draft
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.support.best_first import best_first, trust
from outpace.drafters.support.draws import check_confidence
from outpace.sequence import Sequence


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

    def __init__(self, tokens: Seq[int], max_ngram: int, min_ngram: int = 1) -> None:
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


Context = tuple[int, list[Occurrence]]  # a node's depth, and the matches that support it


@dataclass
class PromptLookupState:
    """A sequence, and the n-gram index of its text.

    Attributes:
        text: the sequence's own tokens, or a copy of them after its source's.
        front: number of tokens of the source at the beginning of the text.
    """

    sequence: Sequence
    index: NgramIndex
    text: list[int]
    front: int

    def update(self) -> None:
        if self.front:
            self.text += self.sequence.tokens[len(self.text) - self.front :]
        self.index.update()

    def revise(self, unchanged: int) -> None:
        """Index the sequence again from its token at ``unchanged`` on."""
        if self.front:
            self.text[self.front + unchanged :] = self.sequence.tokens[unchanged:]
        self.index.revise(self.front + unchanged)


@dataclass(frozen=True)
class PromptLookup(SequenceDrafter[PromptLookupState]):
    """Prompt lookup: drafts what followed earlier occurrences of the last few tokens.

    Attributes:
        max_ngram: the longest n-gram looked up, at least 1.
        min_ngram: the shortest, from 1 to ``max_ngram``.
        num_speculative_tokens: maximum number of tokens drafted per step.
        branches: matches followed at once; the draft branches where they differ. 1 drafts chains.
        min_confidence: a token is drafted only if its estimated chance of acceptance is at least this, in
            [0, 1]. Set it higher if wide forwards are expensive.
    """

    max_ngram: int = 5
    min_ngram: int = 1
    num_speculative_tokens: int = 16
    branches: int = 4
    min_confidence: float = 0.1

    when: ClassVar[str] = "for outputs that repeat their input; simpler than suffix"
    paper: ClassVar[str] = (
        "Saxena 2023, Prompt Lookup Decoding (https://github.com/apoorvumang/prompt-lookup-decoding)"
    )

    def __post_init__(self) -> None:
        self.check_least(min_ngram=1, max_ngram=self.min_ngram, num_speculative_tokens=1, branches=1)
        self.check_most(max_ngram=2**16)
        check_confidence("prompt_lookup", self.min_confidence)

    @property
    def trees(self) -> bool:
        return self.branches > 1

    def start(self, sequence: Sequence, shared: Any) -> PromptLookupState:
        source = () if sequence.source is None else sequence.source.tokens
        text = [*source, *sequence.tokens] if source else sequence.tokens
        index = NgramIndex(text, self.max_ngram, self.min_ngram)
        index.update()  # index the prompt now, so that it does not count as time of the first draft
        return PromptLookupState(sequence, index, text, len(source))

    def draft(self, state: PromptLookupState) -> Draft:
        stops, budget = state.sequence.stop_tokens, state.sequence.budget
        most = self.num_speculative_tokens if budget is None else min(self.num_speculative_tokens, budget)
        state.update()  # not after each step: while nothing is drafted, the index is not needed
        root = (-1, state.index.matches(self.branches))
        return best_first(root, partial(self._children, state.index), most, stops)

    def revise(self, state: PromptLookupState, unchanged: int) -> bool:
        state.revise(unchanged)
        return True

    def _children(
        self, index: NgramIndex, context: Context, chance: float
    ) -> Iterator[tuple[float, int, Context]]:
        """The children of a node: each one's chance, its token, and the matches that support it.

        Each match in turn, the longest first, assigns a share of the remaining probability to its next token.
        At depth d a match of n tokens counts as n + d long, since the drafted tokens agree with it too.
        """
        depth, matches = context[0] + 1, context[1]
        support: dict[int, tuple[float, list[Occurrence]]] = {}
        for match in matches:
            token = index.follow(match, depth)
            stake = chance * trust(match.length + depth)
            chance -= stake
            before, agreeing = support.get(token, (0.0, []))
            support[token] = (before + stake, [*agreeing, match])
        for token, (total, agreeing) in support.items():
            if total >= self.min_confidence:
                yield total, token, (depth, agreeing)
