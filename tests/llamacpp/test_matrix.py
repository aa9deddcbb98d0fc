"""Models that llama.cpp runs give the tokens of plain decoding with every kind of draft, in any company."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")


import outpace
from gguf_files import gguf_file
from outpace.cache import Slot
from outpace.core import SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import Rows, Target
from outpace.targets.batch import Batch
from outpace.targets.llamacpp import LlamaCppTarget
from outpace.targets.llamacpp import cache as llama_cache
from outpace.targets.llamacpp.cache import LlamaCache
from outpace.targets.llamacpp.library import LlamaContext

TEXTS = [
    "Question: Tom has 3 boxes of 12 apples. He gives 5 apples to Ann. How many apples are left?\nAnswer:",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return",
    "Once upon a time there was a time",
]
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=32, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=32, temperature=0.8, top_p=0.95, seed=3, ignore_eos=True),
    "penalties": SamplingParams(max_new_tokens=32, temperature=1.0, repetition_penalty=1.2, seed=4),
}
DRAFTERS = {
    "jacobi": "jacobi",
    "lookahead": "lookahead:window=4,ngram=3,guesses=4",
    "prompt_lookup": "prompt_lookup",
    "suffix": "suffix",
    "token_recycling": "token_recycling",
    "combined": "combined:(token_recycling)+(prompt_lookup)",
    "reference": "reference",
    "cascade": "cascade:draft=(draft_model:num_speculative_tokens=4),inner=(prompt_lookup)",
    "draft_model": "draft_model",
    "draft_model, a tree": "draft_model:branching=2x2",
    "draft_model, growing": "draft_model:expand=3,max_nodes=10",
    "draft_model in GGUF": lambda dtype: DraftModel(LlamaCppTarget(gguf_file("q8_0", draft=True))),
    "a tree by a GGUF": lambda dtype: DraftModel(
        LlamaCppTarget(gguf_file("q8_0", draft=True)), branching="2x2"
    ),
}
FILES = ("float32", "q8_0", "q4_0")


@lru_cache(maxsize=len(FILES) + 2)
def target(dtype: str) -> Any:
    return Target(gguf_file(dtype), threads=1)


@lru_cache(maxsize=1)
def prompts() -> list[list[int]]:
    return [target("q8_0").tokenizer(text).input_ids for text in TEXTS]


@lru_cache(maxsize=64)
def plain(dtype: str, sampling: str) -> list[list[int]]:
    """Each prompt decoded alone, without a draft."""
    params = SAMPLINGS[sampling]
    return [Engine(target(dtype)).generate([prompt], params)[0].tokens for prompt in prompts()]


def together(engine: Engine, params: SamplingParams, references: Sequence[list[int]] = ()) -> list[Any]:
    """Two sequences, and a third that joins; those that end leave."""
    sequences = [engine.add(prompt, params, references=references) for prompt in prompts()[:2]]
    engine.step()
    engine.step()
    sequences.append(engine.add(prompts()[2], params, references=references))
    while engine.sequences:
        engine.step()
    return sequences


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("dtype", FILES)
def test_tokens_are_those_of_plain_decoding(dtype: str, drafter: str, sampling: str) -> None:
    chosen = DRAFTERS[drafter]
    made = chosen if isinstance(chosen, str) else chosen(dtype)
    engine = Engine(target(dtype), made, adaptive=False, prefill_chunk=24)
    references = plain(dtype, "greedy") if drafter == "reference" else ()
    sequences = together(engine, SAMPLINGS[sampling], references)
    assert [sequence.output for sequence in sequences] == plain(dtype, sampling)
    assert sum(sequence.stats.accepted for sequence in sequences) > 0
    assert len(engine._batch.cache) == 0


def test_samples_are_those_of_transformers_with_the_same_seed() -> None:
    ours = outpace.load(None, "float32", "cpu").target
    for sampling, params in SAMPLINGS.items():
        found = [Engine(ours).generate([prompt], params)[0].tokens for prompt in prompts()]
        assert found == plain("float32", sampling)


def test_a_draft_of_too_many_leaves_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four leaves for two texts, whose drafts would have four each."""
    fed: list[int] = []
    begin = LlamaCache.begin

    def counted(self: LlamaCache, feeds: Any) -> Any:
        places = begin(self, feeds)
        fed.append(len({lane for one in places for lanes in one.lanes for lane in lanes}))
        return places

    engine = Engine(target("q8_0"), "draft_model:branching=2x2", adaptive=False)
    monkeypatch.setattr(target("q8_0"), "max_leaves", 4)
    monkeypatch.setattr(LlamaCache, "begin", counted)
    found = engine.generate(prompts()[:2], SAMPLINGS["greedy"])
    assert [one.tokens for one in found] == plain("q8_0", "greedy")[:2]
    assert max(fed) == 4 and sum(one.stats.accepted for one in found) > 0


@pytest.mark.parametrize("dtype", FILES)
def test_plain_decoding_is_the_same_in_company(dtype: str) -> None:
    for sampling, params in SAMPLINGS.items():
        engine = Engine(target(dtype), prefill_chunk=16)
        assert [sequence.output for sequence in together(engine, params)] == plain(dtype, sampling)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_trees_in_company_change_no_bit(dtype: str) -> None:
    """Trees of several texts at once, paths kept of them, a text that ends: the rows have the bits of plain
    decoding, whatever is in the cache beside them."""
    model = target(dtype)
    assert model.bit_exact and not model.why_inexact
    first, second, third = (prompt * 2 for prompt in prompts())
    after = {tuple(text): _rows_alone(model, text) for text in (first, second)}
    cache = model.new_cache(3, 256)
    slots = [cache.allocate() for _ in range(3)]
    _feed(model, cache, {slots[0]: first[:7], slots[1]: second[:9], slots[2]: third[:5]})
    seen = 0
    for turn in range(8):
        feeds, own = {}, {}
        for slot, text in zip(slots[:2], (first, second), strict=True):
            at = cache.length(slot)
            # A path 0, 2, 4 of the text's own tokens, between others.
            own[slot] = text, at
            tokens = [text[at], 5, text[at + 1], 9, text[at + 2], 3]
            feeds[slot] = Rows(tokens, (-1, 0, 0, 1, 2, 2))
        output = model.forward(cache, Batch.of(feeds))
        for slot, (text, at) in own.items():
            rows = output.logits_of(slot)
            for row, place in ((0, at), (2, at + 1), (4, at + 2)):
                seen += 1
                assert rows[row].equal(after[tuple(text)][place])
        cache.keep({slots[0]: [0, 2, 4], slots[1]: [0, 2] if turn % 2 else [0]})
        if turn == 3:
            cache.free(slots[2])
    assert seen == 48


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_padded_forwards_have_the_same_bits_and_leave_no_row(dtype: str) -> None:
    model, text = target(dtype), prompts()[0]
    after = _rows_alone(model, text)
    cache = model.new_cache(1, 256)
    slot = cache.allocate()
    for count in (3, 6, 7, 1, 3):
        assert count == 1 or model._padded(count) > count
        at = cache.length(slot)
        rows = model.forward(cache, Batch.of({slot: text[at : at + count]})).logits_of(slot)
        assert all(rows[place].equal(after[at + place]) for place in range(count))
        cache.keep({slot: range(count)})
    assert cache.context._lib.llama_memory_seq_pos_max(cache.context._memory, 0) == -1


def _feed(model: Any, cache: LlamaCache, texts: dict[Slot, list[int]]) -> None:
    model.forward(cache, Batch.of(texts, None))
    cache.keep({slot: range(len(text)) for slot, text in texts.items()})


def _rows_alone(model: Any, text: Sequence[int]) -> list[Any]:
    """The logits after each token of a text, fed one by one."""
    cache, found = model.new_cache(), []
    slot = cache.allocate()
    for token in text:
        found.append(model.forward(cache, Batch.of({slot: [token]})).logits_of(slot)[0].clone())
        cache.keep({slot: [0]})
    return found


# -- what the tests above guard, broken --------------------------------------------------------------------


def rejected_rows_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LlamaContext, "remove", lambda *given: None)


def any_path_is_taken_for_the_accepted_one(patch: pytest.MonkeyPatch) -> None:
    """Stale rows of rejected nodes pass for the rows of accepted ones."""
    patch.setattr(llama_cache, "common_prefix", lambda first, second: min(len(first), len(second)))


def the_text_lane_wins(patch: pytest.MonkeyPatch) -> None:
    read = LlamaContext.read
    patch.setattr(LlamaContext, "read", lambda self, lane, start, stop: read(self, 2, start, stop))


def siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    begin = LlamaCache.begin

    def wrong(self: LlamaCache, feeds: Any) -> Any:
        places = begin(self, feeds)
        for one in places:
            every = sorted({lane for lanes in one.lanes for lane in lanes})
            one.lanes[:] = [every for _ in one.lanes]
        return places

    patch.setattr(LlamaCache, "begin", wrong)


@pytest.mark.parametrize(
    "bug",
    [
        rejected_rows_stay,
        any_path_is_taken_for_the_accepted_one,
        the_text_lane_wins,
        siblings_see_each_other,
    ],
)
def test_bugs_change_the_tokens(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain("q8_0", "sampled")
    bug(monkeypatch)
    engine = Engine(target("q8_0"), DRAFTERS["lookahead"], adaptive=False)
    assert [sequence.output for sequence in together(engine, SAMPLINGS["sampled"])] != expected
