"""Lookahead decoding: the window's mask against one written by hand, the pool, the end of the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.parallel.lookahead import Lookahead, LookaheadState, _plant
from outpace.engine.engine import Engine
from outpace.sequence import Step
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import Trie, ancestor_mask
from parts import first

PROMPT = [3, 9, 2, 7, 3, 9, 2]


@dataclass(frozen=True)
class Recorded(Lookahead):
    drafts: list[Draft] = field(default_factory=list)
    said: list[int] = field(default_factory=list)

    def draft(self, state: LookaheadState) -> Draft:
        self.drafts.append(super().draft(state))
        return self.drafts[-1]

    def learn(self, state: LookaheadState, step: Step) -> None:
        self.said.extend(step.refill(range(-1, len(step.draft))))
        super().learn(state, step)


def window_mask(widths: list[int]) -> dict[tuple[tuple[int, int], tuple[int, int]], bool]:
    """The mask of the paper's figure: a cell attends to level 0 on its left, and to its own column above.

    Cells are (level, column); (0, 0) is the root.
    """
    cells = [(level, column) for level, width in enumerate(widths) for column in range(width)]
    return {
        (a, b): (b[0] == 0 and b[1] <= a[1]) or (b[1] == a[1] and 0 < b[0] <= a[0])
        for a in cells
        for b in cells
    }


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 3), st.integers(1, 4))
def test_the_mask_of_the_window_is_the_ancestor_mask(
    window: int, levels: int, guesses: int, length: int
) -> None:
    # Steady state has W columns in each level; while warming up the levels are fewer and wider.
    widths = [window] * levels
    tokens = iter(range(10_000))
    cells = [[next(tokens) for _ in range(width)] for width in widths]
    trie = Trie()
    nodes = _plant(cells, trie)
    branches = [trie.add([next(tokens) for _ in range(length)]) for _ in range(guesses)]
    seen = ancestor_mask([-1, *(parent + 1 for parent in trie.parents)])
    expected = window_mask(widths)
    assert len(trie) == window * levels - 1 + guesses * length
    for a, b in expected:
        row, column = nodes[a[0]][a[1]] + 1, nodes[b[0]][b[1]] + 1
        assert seen[row, column] == expected[a, b], (a, b)
    for branch in branches:
        for place, node in enumerate(branch):
            own = np.zeros(len(trie) + 1, dtype=bool)
            own[[0, *(other + 1 for other in branch[: place + 1])]] = True
            assert (seen[node + 1] == own).all()


def test_a_step_has_the_rows_of_the_paper() -> None:
    # (W + G) (N - 1) rows, root included, as long as no two cells or guesses are merged.
    window, ngram = 4, 4
    drafter = Recorded(window=window, ngram=ngram, guesses=0, pool_from_prompt=False)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    Engine(ToyTarget(vocabulary=1000), drafter, adaptive=False).generate([list(range(5, 300))[:60]], params)
    full = [len(draft) + 1 for draft in drafter.drafts[ngram - 1 :]]
    assert max(full) == window * (ngram - 1)


@pytest.mark.parametrize(
    "drafter",
    first(
        2,
        [
            Lookahead(),
            Lookahead(window=3, ngram=3, guesses=2, pool_from_prompt=False, refill="argmax"),
            Lookahead(window=0),
            Lookahead(window=4, ngram=2, guesses=0, seed=3),
        ],
    ),
)
def test_it_keeps_the_contract(drafter: Lookahead) -> None:
    check_drafter(drafter)


def test_window_and_pool_both_save_steps() -> None:
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    target = ToyTarget(surprise=0.5)

    def steps(drafter: Lookahead) -> int:
        return sum(
            g.stats.steps for g in Engine(target, drafter, adaptive=False).generate([PROMPT, [5]], params)
        )

    assert steps(Lookahead()) < steps(Lookahead(window=0)) < 200
    assert steps(Lookahead()) < steps(Lookahead(guesses=0))


@dataclass(frozen=True)
class Moved(Lookahead):
    """Levels before and after each step of a full window, with the tokens emitted."""

    seen: list[tuple[list[list[int]], list[list[int]], int]] = field(default_factory=list)

    def learn(self, state: LookaheadState, step: Step) -> None:
        before = [list(level) for level in state.levels]
        super().learn(state, step)
        if len(before) == self.ngram - 1 and state.levels:
            self.seen.append((before, state.levels, len(step.tokens)))


@pytest.mark.parametrize("moves_by", ["one", "accepted"])
def test_the_window_moves_by_one_place_or_by_the_tokens_emitted(moves_by: Any) -> None:
    drafter = Moved(window=5, ngram=4, guesses=4, moves_by=moves_by)
    params = SamplingParams(max_new_tokens=80, ignore_eos=True)
    Engine(ToyTarget(), drafter, adaptive=False).generate([PROMPT], params)
    assert any(emitted > 1 for _, _, emitted in drafter.seen)
    for before, after, emitted in drafter.seen:
        assert [len(level) for level in after] == [5, 5, 5]
        gone = emitted - 1 if moves_by == "accepted" else 0
        for level in (0, 1):  # the last level is new
            kept = before[level + 1][gone:]
            first = int(level == 0)  # cell (0, 0) is the root
            assert after[level][first : len(kept)] == kept[first:]


def test_tokens_that_end_the_text_never_enter_the_window() -> None:
    drafter = Recorded(window=4, ngram=3, guesses=3)
    # Of five tokens one ends the text, and the target says it now and then.
    engine = Engine(ToyTarget(vocabulary=5, eos=4), drafter, adaptive=False)
    for seed in range(10):
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=30, temperature=2.0, seed=seed))
    assert 4 in drafter.said
    assert not any(4 in draft.tokens for draft in drafter.drafts)


def test_guesses_are_counted_apart() -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    (found,) = Engine(ToyTarget(), Lookahead(), adaptive=False).generate([PROMPT], params)
    assert 0 < found.stats.extra["guessed"] < found.stats.drafted
    (found,) = Engine(ToyTarget(), Lookahead(window=0), adaptive=False).generate([PROMPT], params)
    # The last drafts are cut to what is still allowed, after they were counted.
    assert found.stats.extra["guessed"] >= found.stats.drafted > 0


@pytest.mark.parametrize(
    "options", [{"window": -1}, {"ngram": 1}, {"guesses": -1}, {"refill": "x"}, {"moves_by": "two"}]
)
def test_refuses_options_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(OutpaceError, match=next(iter(options))):
        Lookahead(**options)  # type: ignore[arg-type]
