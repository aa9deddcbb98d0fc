"""The pool of n-grams: by first token, the latest first, the least recently seen forgotten."""

from __future__ import annotations

from outpace.drafters.parallel.lookahead import NgramPool


def test_the_least_recently_seen_is_forgotten() -> None:
    pool = NgramPool(length=2, capacity=2)
    pool.add(1, [2, 3])
    pool.add(1, [4, 5])
    pool.add(1, [2, 3])  # seen again, so [4, 5] is now the older one
    pool.add(1, [6, 7])
    assert pool.get(1) == [(6, 7), (2, 3)]


def test_each_first_token_has_room_of_its_own() -> None:
    pool = NgramPool(length=1, capacity=1)
    pool.add(1, [2])
    pool.add(2, [3])
    pool.add(2, [4])
    assert pool.get(1) == [(2,)]
    assert pool.get(2) == [(4,)]
    assert pool.get(3) == []
    assert len(pool) == 2


def test_no_capacity_keeps_nothing() -> None:
    pool = NgramPool(length=2, capacity=0)
    pool.add_text([1, 2, 3, 4])
    assert len(pool) == 0
    assert pool.get(1) == []


def test_reads_every_whole_ngram_of_a_text_from_a_place_on() -> None:
    pool = NgramPool(length=2, capacity=4)
    pool.add_text([1, 2, 3, 1, 2, 4])
    assert pool.get(1) == [(2, 4), (2, 3)]
    assert pool.get(2) == [(3, 1)]
    assert pool.get(4) == []
    late = NgramPool(length=2, capacity=4)
    late.add_text([1, 2, 3, 1, 2, 4], start=3)
    assert late.get(1) == [(2, 4)]
    late.add_text([1, 2, 3], start=-5)
    assert late.get(1) == [(2, 3), (2, 4)]
