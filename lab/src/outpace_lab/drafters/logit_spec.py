"""LogitSpec (Liu et al. 2025, arXiv 2507.01449): the target's last logits guess the next token but one.

The logits from which the last token was chosen say more than that token: their other best tokens are likely
to come next (section 3). Each is a guess for the token after the root, and is looked up with the text before
it, so that what followed an earlier occurrence is drafted behind it. This needs no model and no training.

Differences from the paper: copies come from suffix automata, as those of ``suffix`` do, and the tree is grown
best-first by estimated chances. Those of the guesses are counted by rank, text by text, where the paper
drafts fixed lengths by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar

from outpace.core import Draft
from outpace.drafters.copying.suffix import Context, Suffix, SuffixState, contexts_after
from outpace.drafters.copying.suffix_memory import SuffixMemory
from outpace.drafters.support.best_first import best_first
from outpace.drafters.support.memories import Memories
from outpace.sequence import Sequence, Step

_FIRST, _FALL = 0.15, 0.6  # assumed chance of the best guess, and that of each further one, relative to it
_DOUBT = 4.0  # weight of these, in steps
_KEEP = 0.98  # share of earlier steps' weight that a further one leaves


@dataclass
class Guesses:
    """Guesses for the token after the root, the best first, and how often those of each rank were right."""

    tokens: list[int] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    counted: float = 0.0

    def chance(self, rank: int) -> float:
        """The probability that the guess of a rank is right."""
        right = self.right[rank] if rank < len(self.right) else 0.0
        return (right + _DOUBT * _FIRST * _FALL**rank) / (self.counted + _DOUBT)

    def count(self, token: int) -> None:
        """Count the token that came after the root."""
        if not self.tokens:
            return
        self.right += [0.0] * (len(self.tokens) - len(self.right))
        self.counted = self.counted * _KEEP + 1
        self.right = [
            right * _KEEP + (rank < len(self.tokens) and self.tokens[rank] == token)
            for rank, right in enumerate(self.right)
        ]


@dataclass
class LogitSpecState(SuffixState):
    """A sequence as ``suffix`` knows it, and the guesses."""

    guesses: Guesses = field(default_factory=Guesses)


@dataclass(frozen=True)
class LogitSpec(Suffix):
    """LogitSpec: what followed the text and the best tokens of the target's last logits.

    Attributes:
        guesses: tokens of the last logits that are guessed to come next, at least 1.
    """

    guesses: int = 8

    when: ClassVar[str] = "to study guesses from the target's last logits, for texts that repeat"
    paper: ClassVar[str] = (
        "Liu et al. 2025, LogitSpec: Accelerating Retrieval-based Speculative Decoding via Next Next Token "
        "Speculation (arXiv 2507.01449)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(guesses=1)

    @property
    def reads_top(self) -> int:
        return self.guesses + 1

    def start(self, sequence: Sequence, shared: Memories[SuffixMemory]) -> LogitSpecState:
        known = super().start(sequence, shared)
        return LogitSpecState(known.sequence, known.memory, known.text, known.after)

    def propose_after(self, state: SuffixState, tokens: Seq[int], most: int) -> Draft:
        assert isinstance(state, LogitSpecState)
        if tokens:
            return super().propose_after(state, tokens, most)
        found, guesses = self._contexts(state), state.guesses
        longest = found[0].length if found else 0
        most = min(
            most, self.num_speculative_tokens, len(guesses.tokens) + int(self.max_spec_factor * longest)
        )
        if state.sequence.budget is not None:
            most = min(most, state.sequence.budget)

        def children_of(
            contexts: list[Context] | None, chance: float
        ) -> Iterator[tuple[float, int, list[Context]]]:
            if contexts is not None:
                yield from self._children(state.after, contexts, chance)
                return
            best = {token: (own, after) for own, token, after in self._children(state.after, found, chance)}
            for rank, token in enumerate(guesses.tokens):
                own, after = best.get(token, (0.0, contexts_after(found, token)))
                best[token] = max(own, guesses.chance(rank)), after
            for token, (own, after) in best.items():
                if own >= self.min_confidence:
                    yield own, token, after

        return best_first(None, children_of, most, state.sequence.stop_tokens)

    def learn(self, state: SuffixState, step: Step) -> None:
        super().learn(state, step)
        assert isinstance(state, LogitSpecState)
        state.guesses.count(step.tokens[0])
        last = step.path[-1] if step.path else -1
        best = step.logits.top([last], self.guesses + 1)[0].tolist()
        state.guesses.tokens = [token for token in best if token != step.tokens[-1]][: self.guesses]
