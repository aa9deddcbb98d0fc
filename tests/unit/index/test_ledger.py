"""The ledger of guesses: which nodes are judged, where they are counted, what is forgotten."""

from __future__ import annotations

import pytest

from outpace.index.ledger import Ledger


def moved(ledger: Ledger, part: int = 0) -> dict[tuple[int, int], int]:
    """Where the chances went up (1) or down (-1), by depth and rank."""
    fresh = Ledger(1)
    found = {}
    for depth in range(12):
        for rank in range(8):
            change = ledger.chance(part, depth, rank) - fresh.chance(0, depth, rank)
            if change:
                found[depth, rank] = 1 if change > 0 else -1
    return found


def test_first_guesses_fall_with_the_rank() -> None:
    chances = [Ledger(2).chance(1, 3, rank) for rank in range(4)]
    assert chances == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])


def test_a_node_is_judged_where_its_parent_was_right() -> None:
    ledger = Ledger(2)
    # Under the root 5 and 6; under 5: 7, 3 and 4; under 6: 8 and 9; under 9: 1.
    ledger.note(1, [5, 6, 7, 8, 9, 1, 3, 4], [-1, -1, 0, 1, 1, 4, 0, 0], [6, 9, 2])
    assert moved(ledger, 1) == {(0, 0): -1, (0, 1): 1, (1, 0): -1, (1, 1): 1, (2, 0): -1}
    assert moved(ledger, 0) == {}


def test_nothing_is_known_under_the_last_token() -> None:
    ledger = Ledger(1)
    ledger.note(0, [6, 9, 2], [-1, 0, 1], [6])
    assert moved(ledger) == {(0, 0): 1}


def test_what_is_deep_or_far_is_counted_together() -> None:
    ledger = Ledger(1)
    ledger.note(0, range(20), range(-1, 19), range(20))
    assert moved(ledger)[11, 0] == 1
    ledger = Ledger(1)
    ledger.note(0, range(9), [-1] * 9, [8])
    assert moved(ledger)[0, 7] == 1
    assert ledger.chance(0, 50, 50) == ledger.chance(0, 11, 7)


def test_it_forgets() -> None:
    ledger = Ledger(1)
    for _ in range(300):
        ledger.note(0, [1], [-1], [1])
    assert ledger.chance(0, 0, 0) > 0.99
    for _ in range(100):
        ledger.note(0, [1], [-1], [2])
    assert ledger.chance(0, 0, 0) < 0.2
