"""Drafting from suffix automata of the prompt, the output and earlier outputs.

SuffixDecoding (Oliaro, Jia, Campos, Qiao 2024, arXiv 2411.04975, section 4) keeps suffix trees of the
request and of earlier outputs, and drafts a tree of the most frequent continuations, which is larger for
longer matches. SAM decoding (Hu et al. 2024, arXiv 2411.10666, section 3) finds the longest match with suffix
automata.

Differences: continuations come not from one match in one tree, but from shorter matches and all automata too,
the longest first, each with a share of the probability by its length (as in prediction by partial matching,
Cleary and Witten 1984) and by how often the text's long matches continued. Earlier outputs are dropped an
eighth of the memory at a time.

With ``guesses``, the other best tokens of the target's last logits are drafted too, as guesses of the next
token but one, with what followed an earlier occurrence of each (LogitSpec, Liu et al. 2025, arXiv 2507.01449,
section 3). Chances of these guesses are counted by rank, text by text, where the paper has fixed lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from typing import ClassVar, NamedTuple

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.copying.guesses import NextGuesses
from outpace.drafters.copying.suffix_automaton import ROOT, SuffixAutomaton
from outpace.drafters.copying.suffix_memory import Cursor, SuffixMemory
from outpace.drafters.support.best_first import best_first, trust
from outpace.drafters.support.draws import check_confidence
from outpace.drafters.support.memories import Memories
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel

_LEAD = 4  # tokens of the prompt stored with an output, so that its first tokens can be found
_LEAST_MEMORY = 64
_CONTEXTS = 8  # maximum number of matches used for a guess
_SHORTER = 3  # maximum number of them from one automaton
_LONG = 5  # matches of at least this length are counted as right or wrong
_DOUBT = 3.0  # weight, in matches, of the probability assumed at first
_KEEP = 0.95  # share of earlier matches' weight that a further one leaves


class Context(NamedTuple):
    """A match: a state of an automaton that represents the last ``length`` tokens, guesses included."""

    length: int
    automaton: SuffixAutomaton
    state: int


class Trust:
    """The probability that the token after a match follows again, learnt from one text's longest matches.

    Texts that are copied continue long matches nearly always, others much less often. Matches in the text
    itself and in the memory are counted separately.

    Args:
        text: the automaton of the text itself.
    """

    def __init__(self, text: SuffixAutomaton) -> None:
        self._text = text
        self._cells: dict[tuple[bool, int], list[float]] = {}  # own, octave of the length -> right, counted

    def chance_after(self, match: Context) -> float:
        length = match.length
        right, counted = self._cells.get((match.automaton is self._text, length.bit_length()), (0.0, 0.0))
        return (right + _DOUBT * trust(length)) / (counted + _DOUBT)

    def count(self, match: Context, token: int) -> None:
        length, automaton, state = match
        if length < _LONG or (guess := automaton.likeliest(state)) < 0:
            return
        cell = self._cells.setdefault((automaton is self._text, length.bit_length()), [0.0, 0.0])
        cell[0] = cell[0] * _KEEP + (guess == token)
        cell[1] = cell[1] * _KEEP + 1


@dataclass
class SuffixState:
    """A sequence, the automaton of its text, and the place of the text's end in each block of the memory.

    ``after`` has the chances of what follows matches of this text, ``guesses`` what may follow the root.
    """

    sequence: Sequence
    memory: SuffixMemory
    text: SuffixAutomaton
    after: Trust
    cursors: dict[SuffixAutomaton, Cursor] = field(default_factory=dict)
    guesses: NextGuesses = field(default_factory=NextGuesses)


@dataclass(frozen=True)
class Suffix(SequenceDrafter[SuffixState]):
    """SuffixDecoding: the most frequent continuations of the text's end, in this text and in earlier outputs.

    Attributes:
        num_speculative_tokens: maximum number of tokens drafted per step.
        max_spec_factor: maximum number of tokens drafted per step, per token of the longest match.
        max_ngram: the longest match looked up, in tokens, at least 1.
        branches: maximum number of continuations drafted per node, the likeliest first. 1 drafts chains.
        min_confidence: a token is drafted only if its estimated chance of acceptance is at least this, in
            [0, 1].
        memory: maximum number of tokens of earlier outputs that an engine keeps, about 500 bytes each; the
            oldest are dropped first. 0 keeps none. Each named memory (``Speculation.memory``) has this size.
        guesses: tokens of the target's last logits that are guessed to come after the last token, at most
            (LogitSpec). It pays where rows are nearly free, on an accelerator, with a low ``min_confidence``.
    """

    num_speculative_tokens: int = 32
    max_spec_factor: float = 4.0
    max_ngram: int = 32
    branches: int = 4
    min_confidence: float = 0.1
    memory: int = 65536
    guesses: int = 0

    when: ClassVar[str] = "for any model and any text: the usual choice"
    paper: ClassVar[str] = (
        "Oliaro et al. 2024, SuffixDecoding (arXiv 2411.04975); Hu et al. 2024, SAM Decoding: Speculative "
        "Decoding via Suffix Automaton (arXiv 2411.10666); guesses: Liu et al. 2025, LogitSpec (arXiv "
        "2507.01449)"
    )

    def __post_init__(self) -> None:
        self.check_least(num_speculative_tokens=1, max_ngram=1, branches=1, guesses=0)
        if not self.max_spec_factor > 0:
            raise OutpaceError(f"suffix: max_spec_factor must be above 0, not {self.max_spec_factor}")
        check_confidence("suffix", self.min_confidence)
        if self.memory and self.memory < _LEAST_MEMORY:
            raise OutpaceError(f"suffix: memory must be 0 or at least {_LEAST_MEMORY}, not {self.memory}")

    @property
    def trees(self) -> bool:
        return self.branches > 1 or self.guesses > 0

    @property
    def reads_top(self) -> int:
        return self.guesses and self.guesses + 1

    @property
    def _counted(self) -> int:
        """Length in tokens of the longest n-grams whose counts matter: a match and the draft after it."""
        return self.max_ngram + self.num_speculative_tokens

    def prepare(self, target: TargetModel) -> Memories[SuffixMemory]:
        return Memories(lambda: SuffixMemory(self.memory, self._counted))

    def start(self, sequence: Sequence, shared: Memories[SuffixMemory]) -> SuffixState:
        text = SuffixAutomaton(self._counted)
        text.extend(sequence.tokens)
        return SuffixState(sequence, shared.memory_of(sequence), text, Trust(text))

    def draft(self, state: SuffixState) -> Draft:
        return self.propose_after(state, (), self.num_speculative_tokens)

    def propose_after(self, state: SuffixState, tokens: Seq[int], most: int) -> Draft:
        contexts = self._contexts(state)
        for token in tokens:
            contexts = _after(contexts, token)
        guesses = () if tokens else state.guesses.tokens
        if not (contexts or guesses):
            return Draft()
        longest = contexts[0].length if contexts else 1  # a guess is looked up by itself
        most = min(
            most, self.num_speculative_tokens, len(guesses) + max(1, int(self.max_spec_factor * longest))
        )
        if state.sequence.budget is not None:
            most = min(most, state.sequence.budget)
        expand = partial(self._children, state.after)
        if not guesses:
            return best_first(contexts, expand, most, state.sequence.stop_tokens)

        def children_of(
            own: list[Context] | None, chance: float
        ) -> Iterator[tuple[float, int, list[Context]]]:
            return self._guessed(state, contexts) if own is None else expand(own, chance)

        return best_first(None, children_of, most, state.sequence.stop_tokens)

    def promise(self, state: SuffixState) -> float:
        self._renew(state)
        copied = max(state.after.chance_after(match) for match in self._longest(state))
        return max(copied, state.guesses.chance(0)) if state.guesses.tokens else copied

    def learn(self, state: SuffixState, step: Step) -> None:
        for token in step.tokens:
            for match in self._longest(state):
                state.after.count(match, token)
            state.text.append(token)
            for cursor in state.cursors.values():
                cursor.append(token)
        if self.guesses:
            state.guesses.count(step.tokens[0])
            best = step.logits.top([step.path[-1] if step.path else -1], self.reads_top)[0].tolist()
            state.guesses.tokens = [token for token in best if token != step.tokens[-1]][: self.guesses]

    def stop(self, state: SuffixState) -> None:
        sequence = state.sequence
        state.memory.add(sequence.tokens[max(0, sequence.prompt_length - _LEAD) :])

    def _contexts(self, state: SuffixState) -> list[Context]:
        """Earlier occurrences of the text's end, the longest matches first."""
        self._renew(state)
        text = state.text
        found = _chain(text, *text.shorter(text.last), self.max_ngram)
        for block, cursor in state.cursors.items():
            found += _chain(block, cursor.state, cursor.length, self.max_ngram)
        return nlargest(_CONTEXTS, found, key=lambda context: context.length)

    def _longest(self, state: SuffixState) -> list[Context]:
        """The longest earlier occurrences of the text's end, in the text and in the memory."""
        match, length = state.text.shorter(state.text.last)
        found = [Context(min(length, self.max_ngram), state.text, match)]
        if state.cursors:
            block, cursor = max(state.cursors.items(), key=lambda item: item[1].length)
            found.append(Context(cursor.length, block, cursor.state))
        return found

    def _renew(self, state: SuffixState) -> None:
        """Look the text's end up again in blocks of the memory that are new or have grown."""
        tokens, before = state.sequence.tokens, state.cursors
        state.cursors = {
            block: before[block]
            if block in before and before[block].size == block.size
            else Cursor(block, self.max_ngram, tokens)
            for block in state.memory.blocks
        }

    def _children(
        self, after: Trust, contexts: Seq[Context], chance: float
    ) -> Iterator[tuple[float, int, list[Context]]]:
        """The children of a node: each one's chance, its token, and the contexts after it.

        Each context in turn, the longest first, assigns a share of the remaining probability to the tokens
        that followed it, in proportion to their counts.
        """
        support: dict[int, float] = {}
        for context in contexts:
            if chance < self.min_confidence:
                break
            counts = context.automaton.followers(context.state)
            total = sum(counts.values())
            if not total:
                continue
            stake = chance * after.chance_after(context)
            chance -= stake
            for token, count in counts.items():
                support[token] = support.get(token, 0.0) + stake * count / total
        likely = nlargest(self.branches, support.items(), key=lambda item: (item[1], -item[0]))
        for token, estimate in likely:
            if estimate >= self.min_confidence and token >= 0:
                yield estimate, token, _after(contexts, token)

    def _guessed(
        self, state: SuffixState, contexts: Seq[Context]
    ) -> Iterator[tuple[float, int, list[Context]]]:
        """The root's children, as ``_children``, and the guesses."""
        best = {token: (own, rest) for own, token, rest in self._children(state.after, contexts, 1.0)}
        # After a root that is new, a guess is looked up by itself.
        places = [*contexts, *(Context(0, automaton, ROOT) for automaton in (state.text, *state.cursors))]
        for rank, token in enumerate(state.guesses.tokens):
            own, rest = best.get(token) or (0.0, _after(places, token))
            best[token] = max(own, state.guesses.chance(rank)), rest
        for token, (chance, rest) in best.items():
            if chance >= self.min_confidence:
                yield chance, token, rest


def _chain(automaton: SuffixAutomaton, state: int, length: int, longest: int) -> list[Context]:
    """A match of at most ``longest`` tokens, and the shorter ones that occur more often."""
    length = min(length, longest)
    state = automaton.find(state, length)
    found: list[Context] = []
    while length and len(found) < _SHORTER:
        found.append(Context(length, automaton, state))
        state, length = automaton.shorter(state)
    return found


def _after(contexts: Seq[Context], token: int) -> list[Context]:
    """The contexts after one more token, without duplicate states.

    A context is shortened until the token follows it and something follows the token.
    """
    once: dict[tuple[SuffixAutomaton, int], Context] = {}
    for length, automaton, state in contexts:
        state, length = automaton.follow(state, length, token)
        while length and not automaton.followers(state):
            state, length = automaton.shorter(state)
        if length:
            once.setdefault((automaton, state), Context(length, automaton, state))
    return sorted(once.values(), key=lambda context: -context.length)
