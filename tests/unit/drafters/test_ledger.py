"""The ledger of guesses: judged nodes, the cells in which they are counted, decay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.core import Draft
from outpace.drafters.combined.ledger import Guesses, Ledger
from outpace.tree import path_to
from unit.test_tree import trees

ONE, OTHER, BOTH = 1, 2, 3
NOBODY = 1 << 20


def by(
    guessers: int, tokens: Sequence[int], parents: Sequence[int], stated: Sequence[float] | None = None
) -> Guesses:
    return Guesses(tokens, parents, [guessers] * len(tokens), stated or [0.0] * len(tokens))


def chance(ledger: Ledger, depth: int, rank: int, guessers: int = ONE, stated: float = 0.0) -> float:
    """That such a node is right where its parent is: in a tree of others' nodes, and one of these."""
    parents = [*range(-1, depth - 1), *[depth - 1] * (rank + 1)]
    others = len(parents) - 1
    guesses = Guesses(range(len(parents)), parents, [*[NOBODY] * others, guessers], [*[0.0] * others, stated])
    worth = ledger.worth(guesses)
    return worth[-1] / (worth[parents[-1]] if depth else 1.0)


def moved(ledger: Ledger, guessers: int = ONE) -> dict[tuple[int, int], int]:
    """The cells whose chances increased (1) or decreased (-1), by depth and rank."""
    found = {}
    for depth in range(12):
        for rank in range(8):
            change = chance(ledger, depth, rank, guessers) - chance(Ledger(), depth, rank, guessers)
            if abs(change) > 1e-9:
                found[depth, rank] = 1 if change > 0 else -1
    return found


def test_first_guesses_fall_with_the_rank() -> None:
    chances = [chance(Ledger(), 3, rank) for rank in range(4)]
    assert chances == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])


def test_a_node_is_worth_the_chances_on_the_way_to_it() -> None:
    assert Ledger().worth(by(ONE, [5, 6, 7], [-1, -1, 1])) == pytest.approx([1 / 2, 1 / 3, 1 / 6])


def test_a_node_is_judged_where_its_parent_was_right() -> None:
    ledger = Ledger()
    # Under the root 5 and 6; under 5: 7, 3 and 4; under 6: 8 and 9; under 9: 1.
    ledger.note(by(OTHER, [5, 6, 7, 8, 9, 1, 3, 4], [-1, -1, 0, 1, 1, 4, 0, 0]), [6, 9, 2])
    assert moved(ledger, OTHER) == {(0, 0): -1, (0, 1): 1, (1, 0): -1, (1, 1): 1, (2, 0): -1}
    assert moved(ledger, ONE) == moved(ledger, BOTH) == {}


def test_who_agrees_is_counted_apart() -> None:
    ledger = Ledger()
    # Under the root the one says 5, the other 6 and both 7, which is right.
    ledger.note(Guesses([5, 6, 7], [-1, -1, -1], [ONE, OTHER, BOTH], [0.0] * 3), [7, 8])
    assert moved(ledger, ONE) == {(0, 0): -1}
    assert moved(ledger, OTHER) == {(0, 1): -1}
    assert moved(ledger, BOTH) == {(0, 2): 1}


def test_what_is_stated_is_believed_until_it_is_measured() -> None:
    ledger = Ledger()
    assert chance(ledger, 0, 5, stated=0.9) == pytest.approx(0.9)
    for _ in range(50):
        ledger.note(by(ONE, [1], [-1], [0.9]), [2])
    assert chance(ledger, 0, 3, stated=0.95) < 0.1  # of the same grade, whatever its rank
    assert chance(ledger, 0, 0, stated=0.4) == pytest.approx(0.4)
    assert moved(ledger) == {}


def test_nothing_is_known_under_the_last_token() -> None:
    ledger = Ledger()
    ledger.note(by(ONE, [6, 9, 2], [-1, 0, 1]), [6])
    assert moved(ledger) == {(0, 0): 1}


def test_what_is_deep_or_far_is_counted_together() -> None:
    ledger = Ledger()
    ledger.note(by(ONE, range(20), range(-1, 19)), range(20))
    assert moved(ledger)[11, 0] == 1
    ledger = Ledger()
    ledger.note(by(ONE, range(9), [-1] * 9), [8])
    assert moved(ledger)[0, 7] == 1
    assert chance(ledger, 50, 50) == pytest.approx(chance(ledger, 11, 7))


def test_it_forgets() -> None:
    ledger = Ledger()
    for _ in range(300):
        ledger.note(by(ONE, [1], [-1]), [1])
    assert chance(ledger, 0, 0) > 0.99
    for _ in range(100):
        ledger.note(by(ONE, [1], [-1]), [2])
    assert chance(ledger, 0, 0) < 0.2


def texts(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The text of each node of a tree, from the root on."""
    return [tuple(tokens[n] for n in path_to(parents, node)) for node in range(len(parents))]


@given(st.lists(trees(most=8), max_size=4))
def test_merging_keeps_every_text_once(drafts: list[Draft]) -> None:
    guesses, maps = Guesses.merged(drafts)
    found = texts(guesses.tokens, guesses.parents)
    said = [texts(draft.tokens, draft.parents) for draft in drafts]
    assert len(found) == len(set(found))
    assert set(found) == {text for own in said for text in own}
    assert [[found[node] for node in nodes] for nodes in maps] == said
    for text, guessers in zip(found, guesses.guessers, strict=True):
        assert guessers == sum(1 << guesser for guesser, own in enumerate(said) if text in own)


def test_the_highest_chance_that_is_stated_counts_and_is_that_under_its_parent() -> None:
    sure = Draft([1, 2], [-1, 0], chances=[0.8, 0.2])
    other = Draft([1, 3, 2], [-1, -1, 0], chances=[0.5, 0.4, 0.3])
    guesses, _ = Guesses.merged([sure, other, Draft([4], [-1])])
    assert list(zip(guesses.tokens, guesses.stated, strict=True)) == [
        (1, 0.8),
        (2, pytest.approx(0.6)),
        (3, 0.4),
        (4, 0.0),
    ]


def test_a_sampled_draft_is_not_merged() -> None:
    with pytest.raises(ValueError, match="separate draws"):
        Guesses.merged([Draft([1], [-1], distributions={})])


@given(
    chances=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=30),
    texts=st.lists(st.integers(0, 30), max_size=40),
    certain=st.booleans(),
)
def test_no_child_is_likelier_than_its_parent(chances: list[float], texts: list[int], certain: bool) -> None:
    """``combined`` relies on it to draft parents first. Rounding could break it where a child is certain."""
    size, total = len(chances), 1.0
    stated = [total := total * (1.0 if certain else chance) for chance in chances]
    # A chance may be stated as more than its parent's, by rounding.
    stated = [chance * (1 + 1e-15 * (place % 3)) for place, chance in enumerate(stated)]
    (guesses, _), ledger = (
        Guesses.merged([Draft((1,) * size, tuple(range(-1, size - 1)), chances=tuple(stated))]),
        Ledger(),
    )
    for length in texts:
        ledger.note(guesses, [1] * min(length, size) + [2])
        worth = ledger.worth(guesses)
        assert all(below <= above for above, below in pairwise(worth))
