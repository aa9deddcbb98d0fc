"""Work that a step of llama.cpp saves: rows that stay in place, arrays that are kept, rows that pad."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

from gguf_files import gguf_file
from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import Output, Rows, Target
from outpace.targets.batch import Batch
from outpace.targets.llamacpp.cache import LlamaCache
from outpace.targets.llamacpp.library import ROWS

TEXTS = [
    "Question: Tom has 3 boxes of 12 apples. He gives 5 apples to Ann. How many apples are left?\nAnswer:",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return",
    "Once upon a time there was a time when all the animals of the wood could speak, and they spoke all day",
]
WRONG = 5


@lru_cache(maxsize=2)
def target(dtype: str) -> Any:
    return Target(gguf_file(dtype), threads=1)


def texts(length: int) -> list[list[int]]:
    return [(target("q8_0").tokenizer(text).input_ids * length)[:length] for text in TEXTS]


@lru_cache(maxsize=8)
def rows_alone(dtype: str, text: tuple[int, ...]) -> list[Any]:
    """The logits after each token of a text, fed one by one."""
    model, found = target(dtype), []
    cache = model.new_cache()
    slot = cache.allocate()
    for token in text:
        found.append(model.forward(cache, Batch.of({slot: [token]})).logits_of(slot)[0].clone())
        cache.keep({slot: [0]})
    return found


def check_array(output: Output) -> None:
    """The array of a forward is its logits, in the same memory."""
    assert output.logits is not None and output.array is not None
    assert np.shares_memory(output.array, output.logits.numpy())
    assert output.array.shape == output.logits.shape


class Fed:
    """One way to feed a text's next tokens: the rows, the places of the text's own, and those to keep."""

    def __init__(self, kind: str, text: list[int], at: int, kept: int) -> None:
        own = text[at : at + 3]
        self.rows = {
            "right": Rows(own[:1]),
            "rejected": Rows(own[:1]),
            "wrong": Rows([WRONG]),
            "chain": Rows(own),
            "tree": Rows([own[0], WRONG, own[1], WRONG, own[2], 3], (-1, 0, 0, 1, 2, 2)),
        }[kind]
        self.own = {"right": [0], "rejected": [0], "wrong": [], "chain": [0, 1, 2], "tree": [0, 2, 4]}[kind]
        self.path = [] if kind == "rejected" else self.own[:kept]


def check_steps(dtype: str, seed: int) -> None:
    """Feed texts by chance, and compare each row with that of the text alone, bit by bit."""
    model, pick = target(dtype), random.Random(seed)
    assert model.bit_exact
    known = texts(80)
    cache = model.new_cache(3, 256)
    slots = {cache.allocate(): text for text in known}
    seen = dict.fromkeys(("right", "rejected", "wrong", "chain", "tree"), 0)
    for turn in range(36):
        plain = pick.random() < 0.4  # every text keeps its one row, as in a step without drafts
        fed = {}
        for slot, text in slots.items():
            kind = "right" if plain else pick.choice([*seen, ""])
            if kind and cache.length(slot) + 3 <= len(text):
                fed[slot] = Fed(kind, text, cache.length(slot), pick.randint(1, 3))
                seen[kind] += 1
        if not fed:
            continue
        before = {slot: cache.length(slot) for slot in slots}
        output = model.forward(cache, Batch.of({slot: one.rows for slot, one in fed.items()}))
        check_array(output)
        for slot, one in fed.items():
            after, rows = rows_alone(dtype, tuple(slots[slot])), output.logits_of(slot)
            for step, row in enumerate(one.own):
                assert rows[row].equal(after[before[slot] + step]), (turn, step)
        # A slot that is left out keeps nothing.
        cache.keep({slot: one.path for slot, one in fed.items() if one.path or pick.random() < 0.5})
        kept = {slot: len(fed[slot].path) if slot in fed else 0 for slot in slots}
        assert {slot: cache.length(slot) - before[slot] for slot in slots} == kept
    assert min(seen.values()) > 3
    assert cache.context._lib.llama_memory_seq_pos_max(cache.context._memory, 0) == -1  # no padding stays


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@pytest.mark.parametrize("seed", range(2))
def test_plain_steps_among_others_change_no_bit(dtype: str, seed: int) -> None:
    """Texts that keep their one row, or reject it, beside others that feed chains or trees, or nothing."""
    check_steps(dtype, seed)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_forwards_of_more_rows_than_a_decode_takes(dtype: str) -> None:
    model, sizes = target(dtype), (300, 150, 100)
    known = [text[:size] for text, size in zip(texts(300), sizes, strict=True)]
    cache = model.new_cache(3, 512)
    slots = {cache.allocate(): text for text in known}
    assert sum(sizes) > ROWS
    output = model.forward(cache, Batch.of(slots))
    check_array(output)  # in memory of its own
    found = {slot: output.logits_of(slot).clone() for slot in slots}
    for slot, text in slots.items():
        after = rows_alone(dtype, tuple(text))
        assert len(found[slot]) == len(text)
        assert all(row.equal(own) for row, own in zip(found[slot], after, strict=True))
    cache.keep(dict.fromkeys(slots, ()))
    last = model.forward(cache, Batch.of(slots, 140))
    spans = [(one.start, one.stop) for one in last.spans.values()]
    assert spans == [(0, 160), (160, 170), (170, 170)]  # the third has fewer rows than that
    for slot in slots:
        assert last.logits_of(slot).equal(found[slot][140:])
    cache.keep(dict.fromkeys(slots, ()))


def test_arrays_are_those_of_their_forward() -> None:
    """Two caches in turn, whose logits have separate memory, with numbers of rows that return.

    llama.cpp has room for one row of logits per sequence; more rows move that memory.
    """
    model, (text, other, _) = target("q8_0"), texts(340)
    caches = [(cache := model.new_cache(), cache.allocate(), own) for own in (text, other)]
    for count in (1, 4, 1, 300, 4, 1, 7, 1):
        for cache, slot, own in caches:
            at = cache.length(slot)
            output = model.forward(cache, Batch.of({slot: own[at : at + count]}))
            check_array(output)
            after = rows_alone("q8_0", tuple(own))
            assert output.array is not None and len(output.array) == count
            assert all((output.array[row] == after[at + row].numpy()).all() for row in range(count))
            cache.keep({slot: range(count)})


@pytest.mark.parametrize("drafter", [None, "suffix", "lookahead:window=3,ngram=3,guesses=3"])
def test_logits_that_replace_the_models_own_are_read(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits put into a copy of an output decide its tokens, not the array beside them."""
    model, params = target("q8_0"), SamplingParams(max_new_tokens=24, ignore_eos=True)
    prompts, forward = texts(40)[:2], model.forward
    own = [one.tokens for one in Engine(model).generate(prompts, params)]

    def changed(copied: bool) -> Any:
        def other(*given: Any, **named: Any) -> Output:
            output = forward(*given, **named)
            if output.logits is None:
                return output
            logits = -output.logits
            return replace(output, logits=logits) if copied else Output(logits, output.spans)

        return other

    monkeypatch.setattr(model, "forward", changed(copied=False))
    expected = [one.tokens for one in Engine(model).generate(prompts, params)]
    monkeypatch.setattr(model, "forward", changed(copied=True))
    found = [one.tokens for one in Engine(model, drafter, adaptive=False).generate(prompts, params)]
    assert found == expected != own


def test_the_array_is_read_in_place_of_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding takes its tokens from the array: other numbers in it are other tokens."""
    model, params = target("q8_0"), SamplingParams(max_new_tokens=8, ignore_eos=True)
    forward = model.forward

    def marked(*given: Any, **named: Any) -> Output:
        output = forward(*given, **named)
        if output.pair is None:
            return output
        array = np.zeros_like(output.pair[1])
        array[:, 7] = 1
        return replace(output, pair=(output.pair[0], array))

    monkeypatch.setattr(model, "forward", marked)
    assert Engine(model).generate(texts(20)[:1], params)[0].tokens == [7] * 8


# -- what the first test guards, broken ---------------------------------------------------------------------


def rejected_rows_count_as_kept(patch: pytest.MonkeyPatch) -> None:
    keep = LlamaCache.keep

    def wrong(self: LlamaCache, paths: Any) -> None:
        plain = {slot: [0] for slot, text in self._texts.items() if text.fed and len(text.tree) == 1}
        keep(self, {**paths, **plain})

    patch.setattr(LlamaCache, "keep", wrong)


def the_stem_of_the_lane_stays_behind(patch: pytest.MonkeyPatch) -> None:
    keep = LlamaCache.keep

    def wrong(self: LlamaCache, paths: Any) -> None:
        before = {slot: text.lanes[0].rows for slot, text in self._texts.items() if len(text.tree) == 1}
        keep(self, paths)
        for slot, rows in before.items():
            self._texts[slot].lanes[0].rows = max(rows - 2, 0)

    patch.setattr(LlamaCache, "keep", wrong)


@pytest.mark.parametrize("bug", [rejected_rows_count_as_kept, the_stem_of_the_lane_stays_behind])
def test_bugs_are_noticed(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, OutpaceError)):
        check_steps("q8_0", 0)
