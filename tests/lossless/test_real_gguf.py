"""Losslessness on GGUF files of one's own: ``make real-gguf GGUF="MODEL.gguf ..."`` runs these tests."""

from __future__ import annotations

import os
from functools import lru_cache

import pytest

from outpace import SamplingParams
from outpace.loading import Loaded, load
from outpace.targets.batch import Batch

FILES = os.environ.get("GGUF", "").split()
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILES, reason="GGUF names no files; make real-gguf runs these tests on them"),
]

QUESTIONS = [
    "Write a Python function that returns the n-th Fibonacci number, and one that returns the first n.",
    "Repeat this sentence twice: The quick brown fox jumps over the lazy dog.",
    "Name three rivers of Europe and the cities they flow through.",
]
PARAMS = [
    SamplingParams(max_new_tokens=32),
    SamplingParams(max_new_tokens=32, temperature=0.8, top_p=0.95, seed=3),
    SamplingParams(max_new_tokens=32, temperature=1.0, repetition_penalty=1.1, seed=4),
]


@lru_cache(maxsize=1)
def loaded(file: str) -> Loaded:
    return load(file, backend="native")


@lru_cache(maxsize=1)
def plain(file: str) -> list[list[int]]:
    return decode(file, "none", 1)


def decode(file: str, drafter: str, slots: int) -> list[list[int]]:
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    engine = loaded(file).engine(drafter, slots=slots, adaptive=False)
    return [one.tokens for one in engine.generate(prompts, PARAMS)]


@pytest.mark.parametrize(
    "drafter", ["suffix", "lookahead", "token_recycling", "jacobi", "combined:(suffix)+(lookahead)"]
)
@pytest.mark.parametrize("file", FILES or [""])
def test_drafts_change_no_token(file: str, drafter: str) -> None:
    assert loaded(file).target.bit_exact
    assert decode(file, drafter, 1) == plain(file) == decode(file, drafter, len(QUESTIONS))


@pytest.mark.parametrize("file", FILES or [""])
def test_a_row_has_the_same_bits_in_a_prompt_and_in_steps(file: str) -> None:
    target = loaded(file).target
    ids = loaded(file).tokens(QUESTIONS[0] * 4)
    found = []
    for width in (len(ids), 1, 5):
        cache = target.new_cache(1, len(ids) + 8)
        slot = cache.allocate()
        rows = []
        for first in range(0, len(ids), width):
            some = ids[first : first + width]
            rows += list(target.forward(cache, Batch.of({slot: some})).logits_of(slot).clone())
            cache.keep({slot: range(len(some))})
        found.append(rows)
    for other in found[1:]:
        assert all(one.equal(two) for one, two in zip(found[0], other, strict=True))
