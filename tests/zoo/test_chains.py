"""Families that take chains only, and decoders that count positions: tokens are those of generate().

Where a family takes chains only, trees are cut to their likeliest path. In float64, but for FSMT, whose own
masks need float32; in batches of different lengths, of which one sequence leaves and another joins.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

import outpace
from outpace import Engine, SamplingParams, Target
from outpace.cache import KVCache
from outpace.core import OutpaceError, UnsupportedModel
from outpace.drafters.models.draft_model import DraftModel
from outpace.targets import Rows
from outpace.targets.batch import Batch
from outpace.targets.inputs.forward import CacheAdapter
from parts import one_in
from zoo.chain_families import CHAINS
from zoo.family import VOCABULARY, WINDOW
from zoo.seq2seq_families import CHAIN_FAMILIES, COUNTING_FAMILIES, START
from zoo.test_families import RandomTrees

NEW = 14
PENALTY = 3.0  # without it random models repeat themselves
SEQ2SEQ = {**COUNTING_FAMILIES, **CHAIN_FAMILIES}
TAKE_CHAINS = {*CHAINS, *CHAIN_FAMILIES}
# Without pads: in a prompt that is read at once some decoders do not count them.
TEXTS = [random.Random(length).choices(range(2, VOCABULARY), k=length) for length in (17, 3, 12)]
STARTS = [[START, *text[: len(text) // 2]] for text in TEXTS]
LIVELY = SamplingParams(max_new_tokens=NEW, repetition_penalty=PENALTY)
SAMPLED = [SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=seed) for seed in (3, 1, 2)]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@cache
def model_of(name: str) -> PreTrainedModel:
    dtype = torch.float32 if name == "fsmt" else torch.float64
    return CHAINS[name].build(dtype) if name in CHAINS else SEQ2SEQ[name].build(dtype)


def prompts_of(name: str) -> list[list[int]]:
    if name == "fsmt":  # in generate() its rows of a longer prompt see later ones
        return [[START]] * 3
    return TEXTS if name in CHAINS else STARTS


def sources_of(name: str) -> list[Any]:
    return [None] * 3 if name in CHAINS else [text[::-1] for text in TEXTS]


@cache
def generated(name: str) -> list[list[int]]:
    """transformers' own greedy output, one at a time."""
    options = {"do_sample": False, "max_new_tokens": NEW, "repetition_penalty": PENALTY}
    outputs = []
    for prompt, source in zip(prompts_of(name), sources_of(name), strict=True):
        ids = torch.tensor([prompt])
        if source is None:
            given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        else:
            given = {"input_ids": torch.tensor([source]), "decoder_input_ids": ids}
        output = GenerationMixin.generate(model_of(name), **given, **options)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@cache
def target_of(name: str) -> Any:
    return Target(model_of(name))


def decode(name: str, drafter: Any = None, params: Any = LIVELY, verifier: str = "match") -> list[Any]:
    engine = Engine(target_of(name), drafter, verifier, prefill_chunk=5, adaptive=False)
    return engine.generate(prompts_of(name), params, sources=sources_of(name))


def tokens(generations: list[Any]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


def trees(name: str, outputs: list[list[int]]) -> RandomTrees:
    return RandomTrees(dict(zip(map(tuple, prompts_of(name)), outputs, strict=True)))


@pytest.mark.parametrize("name", one_in(2, [*CHAINS, *SEQ2SEQ]))
def test_greedy_and_sampled(name: str) -> None:
    expected = generated(name)
    assert len(set(map(tuple, expected))) == 3 and all(len(set(output)) > 8 for output in expected)
    assert bool(target_of(name).why_chains_only) == (name in TAKE_CHAINS)
    assert tokens(decode(name)) == expected
    drafted = decode(name, trees(name, expected))
    assert tokens(drafted) == expected
    assert sum(generation.stats.accepted for generation in drafted) > 4
    plain = tokens(decode(name, params=SAMPLED))
    assert tokens(decode(name, trees(name, plain), SAMPLED)) == plain != expected


@pytest.mark.parametrize("name", one_in(2, [*CHAINS, *SEQ2SEQ], start=1))
def test_a_batch_that_others_leave_and_join(name: str) -> None:
    expected, prompts, sources = generated(name), prompts_of(name), sources_of(name)
    engine = Engine(target_of(name), trees(name, expected), adaptive=False)
    first = [engine.add(prompt, LIVELY, source=own) for prompt, own in zip(prompts, sources, strict=True)]
    engine.step()
    engine.remove(first[0])
    late = engine.add(prompts[0], LIVELY, source=sources[0])
    while engine.sequences:
        engine.step()
    assert [sequence.output for sequence in (late, *first[1:])] == expected


@pytest.mark.parametrize(
    "name", ["mpt", *(pytest.param(name, marks=pytest.mark.slow) for name in CHAINS if name != "mpt")]
)
def test_accelerate_without_a_drafter(name: str) -> None:
    """The default drafts what such a model takes, and lookahead with a window is still refused."""
    model = CHAINS[name].build(torch.float32)
    for make in (outpace.accelerate, lambda model: model):
        options: dict[str, Any] = {} if make is outpace.accelerate else {"custom_generate": outpace.decode()}
        ids = torch.tensor([TEXTS[0]])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
        expected = type(model).generate(model, **given, do_sample=False)
        assert make(model).generate(**given, do_sample=False, **options).tolist() == expected.tolist()
        outpace.restore(model)
    with pytest.raises(OutpaceError, match="give window=0"):
        outpace.accelerate(model, "lookahead")


@pytest.mark.parametrize("drafter", ["jacobi", "suffix", "lookahead:window=0", "token_recycling"])
def test_drafters_of_chains_and_trees(drafter: str) -> None:
    """Greedy without a penalty, so that texts repeat and drafts are accepted."""
    params = SamplingParams(max_new_tokens=30)
    found = decode("bloom", drafter, params)
    assert tokens(found) == tokens(decode("bloom", params=params))
    assert sum(generation.stats.accepted for generation in found) > 10


def test_a_draft_model() -> None:
    assert tokens(decode("bloom", DraftModel(target_of("mpt")))) == generated("bloom")


@pytest.mark.parametrize("verifier", ["rejection", "block", "traversal"])
def test_verifiers_of_chains_and_trees(verifier: str) -> None:
    found = decode("bloom", trees("bloom", generated("bloom")), verifier=verifier)
    assert tokens(found) == generated("bloom")


@pytest.mark.parametrize(("name", "window"), [("gpt-neo", "window_size"), ("llama4", "attention_chunk_size")])
def test_windows_matter(name: str, window: str) -> None:
    """The texts reach past the window: a model without it gives others."""
    config = model_of(name).config
    assert getattr(config, window) == WINDOW < min(len(text) + NEW for text in TEXTS)
    family = CHAINS[name]
    wide = replace(family, options={**family.options, window: 200}).build()
    ids = torch.tensor([TEXTS[0]])
    found, expected = (model(input_ids=ids).logits[0, -1] for model in (wide, model_of(name)))
    assert not torch.allclose(found, expected)


# -- what is refused, and said -----------------------------------------------------------------------------


def test_a_window_of_guesses_is_refused() -> None:
    with pytest.raises(
        OutpaceError, match=r"lookahead: its window is a tree.*takes no position_ids.*window=0"
    ):
        Engine(target_of("bloom"), "lookahead")
    with pytest.raises(OutpaceError, match="its window is a tree"):
        Engine(target_of("bloom"), "combined:(suffix)+(lookahead)")


def test_trees_that_are_fed_are_refused() -> None:
    target = target_of("bloom")
    cache = target.new_cache()
    slot = cache.allocate()
    target.forward(cache, Batch.of({slot: Rows([1, 2], (-1, 0))}))
    with pytest.raises(OutpaceError, match="takes chains only, since it takes no position_ids"):
        target.forward(cache, Batch.of({slot: Rows([1, 2], (-1, -1))}))


def test_a_tree_of_a_draft_model_is_refused() -> None:
    with pytest.raises(OutpaceError, match=r"draft_model: .* takes chains only.*leave out branching"):
        Engine(target_of("mpt"), DraftModel(target_of("bloom"), branching="2x2"))


@pytest.mark.parametrize("option", ["static", "exact"])
def test_options_that_chains_lack(option: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"takes chains only.*leave.* {option}"):
        Target(model_of("bloom"), **{option: True})


@pytest.mark.parametrize("name", ["bart-decoder", "gpt-neo", "bloom", "umt5"])
def test_positions_after_a_cache_are_tested(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheAdapter, "get_seq_length", lambda self, layer_idx=0: 0)
    with pytest.raises(UnsupportedModel, match=r"a chain of tokens|more than their ancestors"):
        Target(model_of(name))


@pytest.mark.parametrize("name", ["bart-decoder", "bloom", "umt5"])
def test_texts_that_share_a_forward_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVCache.begin
    monkeypatch.setattr(KVCache, "begin", lambda self, widths, *_, **__: real(self, widths))
    with pytest.raises(UnsupportedModel, match=r"a chain of tokens|more than their ancestors"):
        Target(model_of(name))


def test_that_trees_are_cut_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Engine(target_of("bloom"), "suffix")
    assert "takes chains only, since it takes no position_ids" in caplog.text
