"""The suffix automaton and the memory, compared with a search through the whole text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.drafters.copying.suffix_automaton import ROOT, SuffixAutomaton
from outpace.drafters.copying.suffix_memory import GENERATIONS, Cursor, SuffixMemory
from parts import first

Text = list[int]
TEXTS = st.lists(st.integers(0, 2), max_size=24)


def build(text: Text, counted: int = 64) -> SuffixAutomaton:
    automaton = SuffixAutomaton(counted)
    automaton.extend(text)
    return automaton


def ends(text: Text, ngram: Text) -> list[int]:
    """The places where an n-gram ends in a text."""
    size = len(ngram)
    return [end for end in range(size, len(text) + 1) if text[end - size : end] == ngram]


def state_of(automaton: SuffixAutomaton, ngram: Text) -> int | None:
    """The state of an n-gram, None where it does not occur."""
    state = ROOT
    for token in ngram:
        if token not in automaton.followers(state):
            return None
        state = automaton.after(state, token)
    return state


def longest_suffix(text: Text, other: Text, most: int = 99) -> int:
    """Length of the longest suffix of ``text`` that occurs in ``other``."""
    return max(size for size in range(min(len(text), most) + 1) if not size or ends(other, text[-size:]))


@given(TEXTS)
def test_it_has_every_substring_as_often_as_the_text_and_no_other(text: Text) -> None:
    automaton = build(text)
    substrings = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    for ngram in substrings:
        state = state_of(automaton, list(ngram))
        assert state is not None
        assert automaton.count(state) == len(ends(text, list(ngram)))
    # As many ways through the automaton as substrings: there are none besides.
    ways = [1] * len(automaton)
    for state in sorted(range(len(automaton)), key=lambda s: -longest(automaton, s)):
        ways[state] = 1 + sum(ways[automaton.after(state, token)] for token in automaton.followers(state))
    assert ways[ROOT] == 1 + len(substrings)
    assert len(automaton) <= max(1, 2 * len(text))
    assert automaton.size == len(text)


def longest(automaton: SuffixAutomaton, state: int) -> int:
    """Length of a state's longest n-gram: an order in which what follows a state comes after it."""
    return automaton._length[state]


@given(TEXTS)
def test_what_follows_and_how_often(text: Text) -> None:
    automaton = build(text)
    for size in range(4):
        for start in range(len(text) - size + 1):
            ngram = text[start : start + size]
            state = state_of(automaton, ngram)
            assert state is not None
            after = [text[end] for end in ends(text, ngram) if end < len(text)]
            assert automaton.followers(state) == {token: after.count(token) for token in after}


@given(TEXTS)
def test_the_longest_suffix_that_occurred_before_at_every_token(text: Text) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, 1):
        automaton.append(token)
        sofar = text[:end]
        expected = max(size for size in range(end) if not size or len(ends(sofar, sofar[-size:])) > 1)
        state, length = automaton.shorter(automaton.last)
        assert length == expected
        assert state == state_of(automaton, sofar[end - length :])
        assert automaton.find(automaton.last, min(end, 2)) == state_of(automaton, sofar[-2:])


@given(TEXTS, st.integers(1, 4))
def test_counts_of_short_ngrams_are_exact(text: Text, counted: int) -> None:
    automaton = build(text, counted)
    for size in range(1, counted + 1):
        for start in range(len(text) - size + 1):
            ngram = text[start : start + size]
            assert automaton.count(state_of(automaton, ngram) or ROOT) == len(ends(text, ngram))


def test_a_text_that_repeats_itself_costs_no_more() -> None:
    """Visits of states, not seconds: twice the text, at most about twice the visits."""

    class Counting(SuffixAutomaton):
        visits = 0

        def find(self, state: int, length: int) -> int:
            self.visits += 1
            return super().find(state, length)

    class Links(list[int]):
        reads = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            Links.reads += 1
            return super().__getitem__(place)

    reads = []
    for size in (2000, 4000):
        automaton = Counting(counted=16)
        automaton._link = Links(automaton._link)
        Links.reads = 0
        automaton.extend([1, 2, 3] * (size // 3))
        reads.append(Links.reads)
    assert reads[1] < 2.2 * reads[0]


@given(TEXTS, TEXTS, st.integers(1, 5))
def test_a_cursor_keeps_up_with_both_texts(text: Text, memory: Text, longest: int) -> None:
    automaton, sofar = SuffixAutomaton(), [1]
    cursor = Cursor(automaton, longest, sofar)
    taken: Text = []
    rng = random.Random(len(text) * 31 + len(memory))
    while text or memory:
        if memory and (not text or rng.random() < 0.5):
            taken.append(memory.pop())
            automaton.append(taken[-1])
        for token in text[: rng.randrange(3)]:
            sofar.append(token)
            cursor.append(token)
            text = text[1:]
        longer = longest_suffix(sofar, taken, longest)
        if cursor.size != automaton.size:
            assert cursor.length <= longer
            assert automaton.find(cursor.state, cursor.length) == state_of(
                automaton, sofar[len(sofar) - cursor.length :]
            )
            if rng.random() < 0.5:
                continue
            cursor = Cursor(automaton, longest, sofar)
        assert cursor.length == longer
        assert automaton.find(cursor.state, cursor.length) == cursor.state
        assert cursor.state == state_of(automaton, sofar[len(sofar) - cursor.length :])


# -- the memory ------------------------------------------------------------------------------------------


def knows(memory: SuffixMemory, ngram: Text) -> bool:
    return any(state_of(block, ngram) is not None for block in memory.blocks)


@pytest.mark.parametrize("tokens", first(2, [64, 200, 1000]))
def test_the_oldest_go_first_and_the_bound_holds(tokens: int) -> None:
    memory, rng = SuffixMemory(tokens, counted=8), random.Random(tokens)
    texts: list[Text] = []
    for number in range(300):
        size = rng.randrange(2, 2 * tokens // GENERATIONS)
        texts.append([1000 * number + place for place in range(size)])
        memory.add(texts[-1])
        assert len(memory) <= tokens
        assert len(memory.blocks) <= GENERATIONS
        known = [knows(memory, text[-1:]) for text in texts]
        # What is known is the latest, without a gap.
        assert known == sorted(known)
        assert known[-1]
    assert not known[0]
    assert len(memory) > tokens / 3


def test_no_ngram_reaches_from_one_text_into_the_next() -> None:
    memory = SuffixMemory(800, counted=8)
    memory.add([1, 2])
    memory.add([3, 4])
    assert knows(memory, [1, 2]) and knows(memory, [3, 4])
    assert not knows(memory, [2, 3])


def test_of_a_long_text_the_end_is_kept() -> None:
    memory = SuffixMemory(80, counted=8)
    memory.add(list(range(50)))
    assert len(memory) == 10
    assert knows(memory, list(range(41, 50)))
    assert not knows(memory, [40])


def test_a_memory_of_nothing() -> None:
    memory = SuffixMemory(0, counted=8)
    memory.add([1, 2, 3])
    memory.add([])
    assert len(memory) == 0 and memory.blocks == []
