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
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from outpace.core import Draft
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.copying.ngram_index import NgramIndex, Occurrence
from outpace.drafters.support.best_first import best_first, trust
from outpace.drafters.support.draws import check_confidence
from outpace.sequence import Sequence

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

        Args:
            chance: the estimated probability that the node itself is accepted.
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
