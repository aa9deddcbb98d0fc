"""Prompts that begin alike share their rows, and nothing else."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from outpace.core import Generation, OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.prefix import BLOCK, PrefixCache
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget

PARAMS = [
    SamplingParams(max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True),
]
SYSTEM = [1 + 7 * place % 31 for place in range(100)]
ENOUGH = 1 << 24


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    return Engine(ToyTarget(context=None)).generate([prompt], params)[0].tokens


def run(engine: Engine, prompt: list[int], params: SamplingParams, salt: str | None = None) -> Generation:
    sequence = engine.add(prompt, params, salt=salt)
    while sequence.finish_reason is None:
        engine.step()
    assert sequence.output == alone(tuple(prompt), params)
    return sequence.generation()


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", [None, "prompt_lookup:branches=2", "lookahead:window=3,ngram=3"])
def test_beginnings_are_shared(drafter: Any, params: SamplingParams) -> None:
    engine = Engine(ToyTarget(context=None), drafter, prefix_cache=ENOUGH)
    first = run(engine, [*SYSTEM, 5, 6], params)
    assert first.stats.cached_tokens == 0
    assert run(engine, [*SYSTEM, 9, 2, 7], params).stats.cached_tokens == 96
    # A token that differs in the second block: the first is shared alone.
    other = [*SYSTEM[:40], 30, *SYSTEM[41:]]
    assert run(engine, other, params).stats.cached_tokens == 32
    # The next turn: the rows of the answer are shared too.
    turn = [*SYSTEM, 5, 6, *first.tokens, *SYSTEM[:30]]
    assert run(engine, turn, params).stats.cached_tokens == 96
    assert run(engine, [*turn, 3], params).stats.cached_tokens == 128
    # All but the last token at most: it is the root.
    assert run(engine, SYSTEM[:96], params).stats.cached_tokens == 64
    assert run(engine, SYSTEM[:97], params).stats.cached_tokens == 96


def test_together_in_one_batch() -> None:
    engine = Engine(ToyTarget(context=None), "prompt_lookup", prefix_cache=ENOUGH)
    prompts = [[*SYSTEM[: 20 * count], count] for count in (1, 2, 3, 4, 5)]
    for _ in range(2):
        found = engine.generate(prompts, PARAMS[1])
        assert [g.tokens for g in found] == [alone(tuple(prompt), PARAMS[1]) for prompt in prompts]
    assert [g.stats.cached_tokens for g in found] == [0, 32, 32, 64, 96]


def test_a_salt_separates() -> None:
    engine = Engine(ToyTarget(context=None), prefix_cache=ENOUGH)
    cached = [
        run(engine, SYSTEM, PARAMS[0], salt).stats.cached_tokens for salt in (None, "a", "b", "a", None, "c")
    ]
    assert cached == [0, 0, 0, 96, 96, 0]


def test_what_ended_early_is_kept_as_far_as_it_came() -> None:
    engine = Engine(ToyTarget(context=None), prefix_cache=ENOUGH)
    sequence = engine.add(SYSTEM, replace(PARAMS[0], max_new_tokens=60))
    other = engine.add(SYSTEM[::-1], PARAMS[0])
    for _ in range(40):
        engine.step()
    engine.remove(sequence)
    while other.finish_reason is None:
        engine.step()
    text = [*SYSTEM, *sequence.output]
    assert run(engine, [*text, 1, 2], PARAMS[1]).stats.cached_tokens == 128
    assert other.output == alone(tuple(SYSTEM[::-1]), PARAMS[0])


def test_a_drafter_that_reads_hidden_states_reads_the_whole_prompt() -> None:
    from outpace.drafters.none import NoDraft

    class Reading(NoDraft):
        def hidden_layers(self, shared: Any) -> tuple[int, ...]:
            return (1,)

        def read(self, states: Any, hidden: Any) -> None:
            assert [len(rows[1]) for rows in hidden] == [99]

    engine = Engine(ToyTarget(context=None), Reading(), prefix_cache=ENOUGH)
    for _ in range(2):
        assert run(engine, SYSTEM, PARAMS[0]).stats.cached_tokens == 0


def test_a_client_evicts_its_own() -> None:
    target = ToyTarget(context=None)
    cache = target.new_cache()
    store = PrefixCache(4 * BLOCK * cache.row_bytes)

    def kept(first: int, client: str) -> int:
        slot, other = cache.allocate(), cache.allocate()
        text = [first, *SYSTEM[:32]]
        found = store.fill(cache, other, text)
        target.forward(cache, Batch.of({slot: text}, None))
        cache.keep({slot: range(len(text))})
        store.keep(cache, slot, text, owner=client)
        cache.free(slot)
        cache.free(other)
        return found

    kept(1, "b")
    for first in range(2, 20):
        assert kept(first, "a") == 0
    assert kept(1, "b") == BLOCK and len(store) == 4
    for client in range(9):  # of many clients, those go first that have not come for longest
        kept(20 + client, f"c{client}")
    assert kept(1, "b") == 0


def test_the_least_recently_used_go_first_and_of_a_text_the_last() -> None:
    target = ToyTarget(context=None)
    cache = target.new_cache()
    store = PrefixCache(4 * BLOCK * cache.row_bytes)
    texts = [[first, *SYSTEM[:95]] for first in (1, 2, 3)]

    def keep(text: list[int]) -> None:
        slot = cache.allocate()
        target.forward(cache, Batch.of({slot: text}, None))
        cache.keep({slot: range(len(text))})
        store.keep(cache, slot, text)
        cache.free(slot)

    def fill(text: list[int]) -> int:
        slot = cache.allocate()
        count = store.fill(cache, slot, text)
        assert cache.length(slot) == count
        cache.free(slot)
        return count

    keep(texts[0])
    assert (len(store), fill([*texts[0], 0])) == (3, 96)
    keep(texts[1])
    assert len(store) == 4
    assert (fill([*texts[1], 0]), fill([*texts[0], 0])) == (96, 32)
    keep(texts[2][:32])
    assert (fill([*texts[0], 0]), fill([*texts[1], 0]), fill(texts[2])) == (32, 64, 32)


def test_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engine.memory.free_bytes", lambda device: 1000 * 2**20)
    engine = Engine(ToyTarget(), prefix_cache=0.1)
    assert engine.prefix_bytes == 100 * 2**20
    assert engine.prefix_rows == engine.prefix_bytes // ToyTarget().new_cache().copied_bytes(1)
    monkeypatch.setattr("outpace.engine.memory.free_bytes", lambda device: None)
    assert Engine(ToyTarget(), prefix_cache=0.1).prefix_bytes == 2**28
    assert Engine(ToyTarget()).prefix_bytes == Engine(ToyTarget()).prefix_rows == 0


def test_a_long_conversation_survives_others_requests() -> None:
    """Each turn of it touches its blocks, so that those of requests that came once go first."""
    target = ToyTarget(context=None)
    row = target.new_cache().copied_bytes(1)
    engine = Engine(target, prefix_cache=12 * BLOCK * row)
    talk = [*SYSTEM, *SYSTEM]
    for turn in range(6):
        found = run(engine, talk, PARAMS[0])
        assert turn == 0 or found.stats.cached_tokens >= len(talk) - 2 * BLOCK, turn
        talk = [*talk, turn + 1]
        for other in range(3):
            run(engine, [turn * 3 + other, *SYSTEM[:BLOCK]], PARAMS[0])


@pytest.mark.parametrize("value", [0, 1.5, True, "x"])
def test_a_limit_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises(OutpaceError, match="prefix_cache must be a whole number"):
        Engine(ToyTarget(), prefix_cache=value)
