"""The places of n-grams in a fixed text, compared with a search through all of it."""

from __future__ import annotations

import random

from outpace.drafters.copying.reference import NgramPlaces, nearest


def test_the_longest_ngram_and_its_places() -> None:
    places = NgramPlaces([1, 2, 3, 1, 2, 4, 1, 2], max_ngram=3)
    assert places.longest([9, 1, 2]) == (2, [2, 5])
    assert places.longest([3, 1, 2]) == (3, [5])
    assert places.longest([2, 4]) == (2, [6])
    assert places.longest([7]) == (0, ())
    assert places.longest([]) == (0, ())


def test_nothing_follows_the_end() -> None:
    assert NgramPlaces([1, 2, 3], max_ngram=2).longest([2, 3]) == (0, ())
    assert NgramPlaces([], max_ngram=2).longest([2]) == (0, ())
    assert NgramPlaces([5], max_ngram=2).longest([5]) == (0, ())


def test_it_finds_what_a_search_finds() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text = [rng.randrange(3) for _ in range(rng.randrange(30))]
        tail = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        longest = rng.randrange(1, 5)
        expected: tuple[int, list[int]] = (0, [])
        for size in range(1, min(longest, len(tail)) + 1):
            found = [p for p in range(size, len(text)) if text[p - size : p] == tail[-size:]]
            expected = (size, found) if found else expected
        length, places = NgramPlaces(text, longest).longest(tail)
        assert (length, list(places)) == expected


def test_nearest_looks_ahead_first() -> None:
    assert nearest([3, 7, 20], 0) == 3
    assert nearest([3, 7, 20], 7) == 7
    assert nearest([3, 7, 20], 8) == 20
    assert nearest([3, 7, 20], 21) == 20
