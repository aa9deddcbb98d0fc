"""Prompts whose chunks ride in the steps of others: all tokens are those of plain decoding of each alone."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from lossless.prompts import PROMPTS
from outpace.core import SamplingParams, Speculation
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch, Building
from parts import in_turn

DRAFTERS = ["none", "prompt_lookup:branches=2", "lookahead:window=4,ngram=4,guesses=4", "eagle", "suffix"]
GREEDY = SamplingParams(24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.9, frequency_penalty=0.5)
CHUNK = 24


@lru_cache
def texts() -> list[list[int]]:
    """Prompts of 8 to 150 tokens, the longer ones with a common beginning."""
    ids: list[list[int]] = AutoTokenizer.from_pretrained(outpace.nano_path())(PROMPTS).input_ids
    long = [token for text in ids[:5] for token in text]
    return [
        ids[20][:8],
        ids[1],
        [*long[:100], *ids[2]],
        [*long[:70], *ids[3]],
        ids[21],
        [*long[:100], 7],
        ids[4],
    ]


@lru_cache
def target_of(dtype: torch.dtype, plan: str | None = None) -> CausalTarget:
    target = CausalTarget(AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=dtype), plan=plan)
    if dtype == torch.bfloat16 and not target.bit_exact:
        pytest.skip(f"not bit-exact here: {target.why_inexact}")
    assert target.mixes == (dtype != torch.float64)
    return target


def params() -> list[SamplingParams]:
    """Greedy and sampled in turns."""
    return [replace(own, seed=place) for place, own in zip(range(len(texts())), cycle((SAMPLED, GREEDY)))]


@lru_cache
def alone(dtype: torch.dtype, plan: str | None = None) -> list[list[int]]:
    engine = Engine(target_of(dtype, plan))
    pairs = zip(texts(), params(), strict=True)
    return [engine.generate([text], own)[0].tokens for text, own in pairs]


@pytest.fixture
def rode(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of prompts of which each forward feeds rows beside the rows of steps."""
    counts: list[int] = []
    run = CausalTarget.run

    def note(self: CausalTarget, cache: Any, batch: Batch, *args: Any) -> Any:
        unread = [width > len(batch.reads[s]) for s, width in zip(batch.slots, batch.widths, strict=True)]
        if any(unread) and not all(unread):
            counts.append(sum(unread))
        return run(self, cache, batch, *args)

    monkeypatch.setattr(CausalTarget, "run", note)
    return counts


def decode(dtype: torch.dtype, drafter: str, plan: str | None = None) -> list[list[int]]:
    """The tokens of all texts, which join one after another while the first ones are decoded."""
    engine = Engine(target_of(dtype, plan), drafter, adaptive=False, prefill_chunk=CHUNK)
    waiting = list(zip(texts(), params(), strict=True))[::-1]
    sequences = [engine.add(*waiting.pop())]
    while engine.sequences:
        engine.step()
        for _ in range(min(2, len(waiting))):
            sequences.append(engine.add(*waiting.pop()))
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize(
    ("drafter", "dtype"), in_turn(DRAFTERS, [torch.bfloat16, torch.float32, torch.float64])
)
def test_tokens_are_those_of_each_alone(rode: list[int], drafter: str, dtype: torch.dtype) -> None:
    expected = alone(dtype)
    assert decode(dtype, drafter) == expected
    assert dtype == torch.float64 or (len(rode) > 3 and max(rode) > 1)


@pytest.mark.parametrize(
    ("drafter", "dtype"), [("lookahead:window=4,ngram=4,guesses=4", torch.bfloat16), ("none", torch.float32)]
)
def test_rows_of_transformers_modules_share_forwards(
    rode: list[int], drafter: str, dtype: torch.dtype
) -> None:
    """Those of prompts and of steps, of which only attention is computed per window of the cache."""
    target, expected = target_of(dtype, "exact"), alone(dtype, "exact")
    before = target.plan.layouts["flat"]
    assert decode(dtype, drafter, "exact") == expected
    assert target.plan.layouts["flat"] > before + 3 and len(rode) > 3 and max(rode) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_prompts_that_hit_the_prefix_cache(rode: list[int], dtype: torch.dtype) -> None:
    target, expected = target_of(dtype), alone(dtype)
    engine = Engine(target, "prompt_lookup", adaptive=False, prefill_chunk=CHUNK, prefix_cache=1 << 26)
    first = engine.add(texts()[2], params()[2])
    for _ in range(8):
        engine.step()  # its prompt is stored when it has been read, not only when the sequence ends
    assert first.finish_reason is None
    sequences = [engine.add(text, own) for text, own in zip(texts(), params(), strict=True)]
    while engine.sequences:
        engine.step()
    assert [sequence.output for sequence in sequences] == expected
    assert [s.stats.cached_tokens for s in sequences] == [0, 0, 96, 64, 0, 96, 0] and rode


def test_sequences_of_several_drafters(rode: list[int]) -> None:
    names = [None, "off", "copy", "window", Speculation("copy", 2), None, "window"]
    engine = Engine(
        target_of(torch.float32),
        "jacobi",
        adaptive=False,
        prefill_chunk=CHUNK,
        drafters={"copy": "prompt_lookup:branches=2", "window": "lookahead:window=3,ngram=3"},
    )
    sequences = []
    for text, own, name in zip(texts(), params(), names, strict=True):
        sequences.append(engine.add(text, replace(own, speculation=name)))
        engine.step()
    while engine.sequences:
        engine.step()
    assert [sequence.output for sequence in sequences] == alone(torch.float32)
    assert rode


def test_only_rows_that_are_read_reach_the_head() -> None:
    """Of prompts of many rows beside a tree."""
    target, rows = target_of(torch.float32, "exact"), []
    flat = target._modules.flat
    assert flat is not None
    head: Any = flat.step.get_output_embeddings()
    cache = target.new_cache(slots=3)
    slots = [cache.allocate() for _ in range(3)]
    building = Building()
    building.add(slots[0], Rows([1, 2, 3], (-1, 0, 0)))
    building.add(slots[1], Rows([4] * 90), read=90)
    building.add(slots[2], Rows([5] * 80), read=79)
    batch = building.made()
    alone = [target.forward(cache, batch.select([slot])[0]) for slot in (slots[0], slots[2])]
    hook = head.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[1]))
    target.keep_modules()
    try:
        found = target.forward(cache, batch)
    finally:
        hook.remove()
    assert rows == [4]
    for slot, expected in zip((slots[0], slots[2]), alone, strict=True):
        torch.testing.assert_close(found.logits_of(slot), expected.logits_of(slot))
    assert not len(found.logits_of(slots[1]))
