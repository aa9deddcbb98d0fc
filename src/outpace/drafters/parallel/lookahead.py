"""Lookahead decoding (Fu, Bailis, Stoica, Zhang 2024, arXiv 2402.02057).

A window of W columns and N - 1 levels holds guesses of what comes: cell (l, i) is a token l + i places
after the root, which is cell (0, 0). Cell (0, i) hangs under (0, i - 1), cell (l, i) under (l - 1, i), so
the window is a tree, and the paper's attention pattern is that tree's ancestor mask. Each step the target
says what follows the top cell of each column (a parallel Jacobi iteration); a column and that token are
an n-gram of N tokens, which goes into a pool. Pooled n-grams that begin with the root are guesses,
verified in the same forward.

What differs from the paper's implementation: window and guesses are merged in one trie, so a window cell
that turns out right is accepted too, and equal beginnings are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar, Literal

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Filler, SequenceDrafter
from outpace.drafters.parallel.ngram_pool import NgramPool
from outpace.sequence import Sequence, Step
from outpace.tree import Trie


@dataclass
class LookaheadState:
    """A sequence's window and pool.

    ``levels[l][i]`` is the token of cell (l, i); ``nodes[l][i]`` the node that stands for it in the draft to
    be learnt from, whose first ``cells`` nodes are the window's. There are none where nothing was drafted.
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
        guesses: G, n-grams kept for each first token and verified in one step; 0 verifies the window alone.
        pool_from_prompt: fill the pool from the prompt.
        pool_from_output: fill the pool from accepted text.
        refill: a cell gets the target's keyed draw, or its argmax. (The same where decoding is greedy.)
        seed: of the tokens that fill the window before a forward has.
    """

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    pool_from_prompt: bool = True
    pool_from_output: bool = True
    refill: Literal["draw", "argmax"] = "draw"
    seed: int = 0

    paper: ClassVar[str] = (
        "Fu et al. 2024, Break the Sequential Dependency of LLM Inference (arXiv 2402.02057)"
    )

    def __post_init__(self) -> None:
        for name, value, least in (
            ("window", self.window, 0),
            ("ngram", self.ngram, 2),
            ("guesses", self.guesses, 0),
        ):
            if value < least:
                raise OutpaceError(f"lookahead: {name} must be at least {least}, not {value}")
        if self.refill not in ("draw", "argmax"):
            raise OutpaceError(f"lookahead: refill must be 'draw' or 'argmax', not {self.refill!r}")

    @property
    def trees(self) -> bool:
        return self.window > 0 or self.guesses > 1

    @property
    def widths(self) -> tuple[int, ...]:
        """The whole window, since a column that is cut teaches nothing, and 0, 1, ... or all guesses."""
        length = self.ngram - 1
        cells = self.window * length - 1 if self.window else 0
        return tuple(w for g in range(self.guesses + 1) if (w := cells + g * length)) or (1,)

    @property
    def ramp(self) -> int:
        """So many steps fill the levels, and as many the pool with what came of them."""
        return 2 * (self.ngram - 1) if self.window else 1

    def start(self, sequence: Sequence, shared: Any) -> LookaheadState:
        pool = NgramPool(self.ngram - 1, self.guesses)
        state = LookaheadState(sequence, pool, Filler(sequence, self.seed), [])
        if self.pool_from_prompt:
            state.pool.add_text(sequence.tokens)
        self._restart(state)
        return state

    def draft(self, state: LookaheadState) -> Draft:
        trie = Trie()
        if self.window and not state.levels:
            self._restart(state)
        state.nodes = _plant(state.levels, trie) if self.window else []
        state.cells = len(trie)
        for guess in state.pool.get(state.sequence.tokens[-1]):
            trie.add(guess, budget=state.sequence.budget)
        return trie.draft()

    def learn(self, state: LookaheadState, step: Step) -> None:
        tokens = state.sequence.tokens
        state.sequence.stats.count("guessed", sum(node >= state.cells for node in step.kept))
        if self.pool_from_output:
            state.pool.add_text(tokens, len(tokens) - len(step.tokens) - self.ngram + 1)
        if state.nodes:
            self._roll(state, step)
        else:
            state.levels = []  # made anew when a draft is wanted: many steps may go without one
        state.nodes = []

    def _restart(self, state: LookaheadState) -> None:
        """One level to begin with, wide enough to lose a column in each step until all levels are there."""
        state.levels = [[state.sequence.tokens[-1]]]
        self._widen(state, self.window + self.ngram - 2)

    def _roll(self, state: LookaheadState, step: Step) -> None:
        """Ask the target what follows the top cells, pool the columns, move the window to the new root."""
        # A draft that was trimmed has lost its deepest cells, those of the last columns, or others too where
        # it is one of several. The columns before the first that is lost are as they were.
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
        # Cell (l, i) is l + i places after the root. The root moves on by the tokens emitted; one level
        # dropped is one place, the rest are columns.
        moved = len(step.tokens) - full
        state.levels = [level[moved:] for level in levels]
        self._widen(state, self.window + self.ngram - 1 - len(levels))

    def _widen(self, state: LookaheadState, columns: int) -> None:
        """Give every level this many columns, and put the root in cell (0, 0)."""
        for level in state.levels:
            level.extend(state.filler() for _ in range(columns - len(level)))
            del level[columns:]
        state.levels[0][0] = state.sequence.tokens[-1]


def _plant(levels: Seq[Seq[int]], trie: Trie) -> list[list[int]]:
    """Put the window into a trie; the node of each cell. The root's is -1."""
    nodes = [[-1]]
    for token in levels[0][1:]:
        nodes[0].extend(trie.add([token], under=nodes[0][-1]))
    for level in levels[1:]:
        nodes.append(
            [trie.add([token], under=above)[0] for token, above in zip(level, nodes[-1], strict=False)]
        )
    return nodes
