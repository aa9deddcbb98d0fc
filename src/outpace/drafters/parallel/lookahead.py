"""Lookahead decoding (Fu, Bailis, Stoica, Zhang 2024, arXiv 2402.02057).

A window of levels 0 to N - 2 and columns 0 to W - 1 contains guesses of future tokens: the cell (l, i) of
level l and column i is a guess of the token l + i places after the root, which is cell (0, 0). The parent of
cell (0, i) is (0, i - 1), that of cell (l, i) is (l - 1, i), so the window is a tree, and the paper's
attention pattern is that tree's ancestor mask. In each step the target predicts the token after the top cell
of each column (a parallel Jacobi iteration); a column and that token are an n-gram of N tokens, which is
added to a pool. Pooled n-grams that begin with the root are guesses, verified in the same forward.

Differences from the paper's implementation: window and guesses are merged in one trie, so correct window
cells are accepted too, and common prefixes are computed once. The window moves by one place per step, as
published; moving it with the text keeps each cell at its place, but restarts a column for each further token.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar, Literal

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Filler, SequenceDrafter
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.tree import Trie


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

    def add_text(self, tokens: Seq[int], start: int = 0) -> None:
        """Add every n-gram of a text that begins at token ``start`` or later."""
        for place in range(max(start, 0), len(tokens) - self.length):
            self.add(tokens[place], tokens[place + 1 : place + 1 + self.length])

    def get(self, first: int) -> list[tuple[int, ...]]:
        """Continuations of a token, the most recent first."""
        return list(reversed(self._entries.get(first, ())))

    def __len__(self) -> int:
        return sum(len(entry) for entry in self._entries.values())


@dataclass
class LookaheadState:
    """A sequence's window and pool.

    ``levels[l][i]`` is the token of cell (l, i); ``nodes[l][i]`` is its node in the last draft, whose first
    ``cells`` nodes are the window's; ``nodes`` is empty if nothing was drafted.
    """

    sequence: Sequence
    pool: NgramPool
    filler: Filler
    levels: list[list[int]]
    nodes: list[list[int]] = field(default_factory=lambda: [[]])
    cells: int = 0


@dataclass(frozen=True)
class Lookahead(SequenceDrafter[LookaheadState]):
    """Lookahead decoding: a window of parallel Jacobi iterations and a pool of n-grams.

    Attributes:
        window: W, columns of the window; 0 keeps only the pool.
        ngram: N, length of the n-grams, at least 2.
        guesses: G, n-grams kept per first token and verified per step; 0 verifies the window alone.
        pool_from_prompt: fill the pool from the prompt.
        pool_from_output: fill the pool from accepted text.
        refill: "draw" fills cells with the target's keyed draw, "argmax" with its argmax; the same if greedy.
        moves_by: places by which the window moves per step: "one", as published, or "accepted", the number
            of tokens emitted, so that each cell keeps its place in the text.
        seed: seed of the filler tokens in cells that no forward has computed.
    """

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    pool_from_prompt: bool = True
    pool_from_output: bool = True
    refill: Literal["draw", "argmax"] = "draw"
    moves_by: Literal["one", "accepted"] = "one"
    seed: int = 0

    when: ClassVar[str] = "on an accelerator with few requests, where rows are nearly free"
    paper: ClassVar[str] = (
        "Fu et al. 2024, Break the Sequential Dependency of LLM Inference (arXiv 2402.02057)"
    )

    def __post_init__(self) -> None:
        self.check_least(window=0, ngram=2, guesses=0)
        self.check_most(window=1024, ngram=128)
        self.check_choices("refill", "moves_by")

    @property
    def trees(self) -> bool:
        return self.window > 0 or self.guesses > 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes of the full window, since a cut column yields no n-gram, plus 1, ... G guesses.

        The window alone is a width only if there are no guesses: it costs most of the rows, and what its
        n-grams gain shows only where they are verified.
        """
        length = self.ngram - 1
        cells = self.window * length - 1 if self.window else 0
        return tuple(cells + g * length for g in range(1, self.guesses + 1)) or (max(cells, 1),)

    @property
    def narrow_widths(self) -> tuple[int, ...]:
        """Nodes of 1, ... G guesses without the window, if the text itself fills the pool."""
        if not (self.window and (self.pool_from_prompt or self.pool_from_output)):
            return ()
        return tuple(g * (self.ngram - 1) for g in range(1, self.guesses + 1))

    @property
    def ramp(self) -> int:
        """2 (N - 1): N - 1 steps to fill the levels, and as many to pool n-grams from full columns."""
        return 2 * (self.ngram - 1) if self.window else 1

    def prepare(self, target: TargetModel) -> None:
        if self.window and target.why_chains_only:
            raise OutpaceError(
                f"lookahead: its window is a tree, and {target.name} takes chains only, since "
                f"{target.why_chains_only}; give window=0, which drafts from its pool alone, or use jacobi, "
                "suffix or prompt_lookup"
            )

    def start(self, sequence: Sequence, shared: Any) -> LookaheadState:
        pool = NgramPool(self.ngram - 1, self.guesses)
        state = LookaheadState(sequence, pool, Filler(sequence, self.seed), [])
        if self.pool_from_prompt:
            state.pool.add_text(sequence.tokens)
        if self.window:
            self._restart(state)
        return state

    def draft(self, state: LookaheadState) -> Draft:
        trie = Trie()
        window = self.window > 0 and not state.sequence.narrow
        if window and not state.levels:
            self._restart(state)
        state.nodes = _plant(state.levels, trie) if window else []
        state.cells = len(trie)
        for guess in state.pool.get(state.sequence.tokens[-1]):
            trie.add(guess, budget=state.sequence.budget)
        return trie.draft()

    def learn(self, state: LookaheadState, step: Step) -> None:
        tokens = state.sequence.tokens
        state.sequence.stats.count("guessed", sum(node >= state.cells for node in step.kept))
        if self.pool_from_output:
            state.pool.add_text(tokens, len(tokens) - len(step.tokens) - self.ngram + 1)
        if self.window and state.nodes:
            self._roll(state, step)
        else:
            state.levels = []  # rebuilt at the next draft, which may be many steps away
        state.nodes = []

    def _restart(self, state: LookaheadState) -> None:
        """Begin with level 0 alone, wide enough to lose a column per step until all levels exist.

        With k levels the window has W + N - 1 - k columns: W + N - 2 at first, W once it has N - 1 levels.
        """
        state.levels = [[state.sequence.tokens[-1]]]
        self._widen(state, self.window + self.ngram - 2)

    def _roll(self, state: LookaheadState, step: Step) -> None:
        """Add the target's predictions after the top cells as a level, pool the columns, move the window.

        A window of k levels gets level k; a full one, of N - 1 levels, then loses level 0. Cell (0, 0)
        becomes the new root.
        """
        # A trimmed draft lacks its deepest cells, those of the last columns; as part of a combined draft it
        # may lack others too. Columns 0 to len(top) - 1, before the first missing cell, are complete.
        place = {old: new for new, old in enumerate(step.kept)} | {-1: -1}
        top = [place[node] for node in takewhile(place.__contains__, state.nodes[-1])]
        new = step.refill(top, argmax=self.refill == "argmax")
        stops = state.sequence.stop_tokens
        new = [state.filler() if token in stops else token for token in new]
        levels = [*state.levels, new]
        full = len(levels) == self.ngram
        if full:
            for column in zip(*levels, strict=False):
                state.pool.add(column[0], column[1:])
            levels = levels[1:]
        # Cell (l, i) is l + i places after the root. If the window moves by m places, old cell (l, i) becomes
        # new cell (l - 1, i - (m - 1)) if level 0 was dropped (a full window), and (l, i - m) otherwise: the
        # first `moved` columns are dropped. With m = 1 a full window keeps all its columns: when several
        # tokens were accepted, they then guess later places than they were filled for, but none restarts
        # from filler.
        moved = (1 if self.moves_by == "one" else len(step.tokens)) - full
        state.levels = [level[moved:] for level in levels]
        self._widen(state, self.window + self.ngram - 1 - len(levels))

    def _widen(self, state: LookaheadState, columns: int) -> None:
        """Make every level ``columns`` wide, and put the root in cell (0, 0)."""
        for level in state.levels:
            level.extend(state.filler() for _ in range(columns - len(level)))
            del level[columns:]
        state.levels[0][0] = state.sequence.tokens[-1]


def _plant(levels: Seq[Seq[int]], trie: Trie) -> list[list[int]]:
    """Put the window into a trie."""
    nodes = [[-1]]
    for token in levels[0][1:]:
        nodes[0].extend(trie.add([token], under=nodes[0][-1]))
    for level in levels[1:]:
        nodes.append(
            [trie.add([token], under=above)[0] for token, above in zip(level, nodes[-1], strict=False)]
        )
    return nodes
