"""The index of n-grams against a search of the whole text, and that it never searches the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.drafters.copying.prompt_lookup import NgramIndex, Occurrence


def search(text: list[int], max_ngram: int, min_ngram: int, limit: int) -> list[Occurrence]:
    """The matches that the index should return, by looking at every place."""
    found = []
    for place in range(1, len(text)):
        length = 0
        while length < min(max_ngram, place) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length >= min_ngram:
            found.append(Occurrence(length, place))
    return sorted(found, reverse=True)[:limit]


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 7),
)
def test_finds_the_longest_and_latest(text: list[int], low: int, more: int, limit: int, stride: int) -> None:
    grown: list[int] = []
    index = NgramIndex(grown, low + more, low)
    for start in range(0, len(text), stride):
        grown.extend(text[start : start + stride])
        index.update()
        assert index.matches(limit) == search(grown, low + more, low, limit)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=6)), max_size=8),
    st.integers(1, 3),
)
def test_a_text_that_is_changed_is_searched_as_it_is(changes: list[tuple[int, list[int]]], high: int) -> None:
    text: list[int] = [0]
    index = NgramIndex(text, high)
    index.update()
    for kept, more in changes:
        kept = min(max(kept, 1), len(text))
        text[kept:] = more
        index.revise(kept)
        assert index.matches(5) == search(text, high, 1, 5)


def test_follows_a_match_into_its_own_continuation() -> None:
    index = NgramIndex([9, 1, 2, 3, 1], 3)
    index.update()
    (match,) = index.matches(4)
    assert match == Occurrence(1, 2)
    assert [index.follow(match, depth) for depth in range(7)] == [2, 3, 1, 2, 3, 1, 2]


def test_a_text_that_has_grown_is_refused_until_it_is_read() -> None:
    text = [1, 2, 1]
    index = NgramIndex(text, 2)
    index.update()
    text.append(2)
    with pytest.raises(ValueError, match="update"):
        index.matches(1)
    index.update()
    assert index.matches(1) == [Occurrence(2, 2)]


class Counted(list[int]):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(place)


def test_a_step_costs_the_same_in_a_long_text() -> None:
    def reads(length: int) -> int:
        text = Counted([1, 2, 3, 4, 5] * (length // 5))
        index = NgramIndex(text, 5)
        index.update()
        text.append(1)
        text.reads = 0
        index.update()
        matches = index.matches(4)
        assert len(matches) == 4
        return text.reads

    assert reads(50) == reads(5000) < 20
