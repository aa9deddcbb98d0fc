"""Encoder-decoder families: the engine's tokens are those of transformers' own generate.

In float64, plainly greedy and with a penalty, without which random decoders repeat themselves (a head that is
the embeddings makes a token its own best successor). As with decoder-only families, random trees make most
accepted paths run through rows that are not contiguous. Prompts and sources are of several lengths.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from outpace import Engine, SamplingParams, Target
from parts import one_in
from zoo.family import VOCABULARY
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES, SEQ2SEQ_RUNS, START
from zoo.test_families import RandomTrees

NEW = 26
# What the decoder starts with: its start token alone, or more after it, as forced tokens are.
PROMPTS = [[START, *random.Random(length).choices(range(VOCABULARY), k=length)] for length in (9, 0, 4)]
LENGTHS = (6, 17, 11)
PENALTY = 3.0
GREEDY = SamplingParams(max_new_tokens=NEW)
LIVELY = SamplingParams(max_new_tokens=NEW, repetition_penalty=PENALTY)
SAMPLED = [SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=seed) for seed in (3, 1, 2)]
LOOKAHEAD = "lookahead:window=4,ngram=3,guesses=3"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@cache
def model_of(name: str, attention: str) -> PreTrainedModel:
    return SEQ2SEQ_FAMILIES[name].build(attention=attention)


def sources_of(name: str) -> list[Any]:
    return SEQ2SEQ_FAMILIES[name].sources(LENGTHS)


@cache
def generated(name: str, attention: str, penalty: float = PENALTY) -> list[list[int]]:
    return generated_by(model_of(name, attention), sources_of(name), penalty)


def generated_by(model: PreTrainedModel, sources: list[Any], penalty: float = PENALTY) -> list[list[int]]:
    """transformers' own greedy output, one at a time. (Whisper's own generate() goes about it in windows.)"""
    outputs = []
    for prompt, source in zip(PROMPTS, sources, strict=True):
        given = torch.tensor([source]) if isinstance(source, list) else source[None].to(model.dtype)
        output = GenerationMixin.generate(
            model,
            given,
            decoder_input_ids=torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NEW,
            repetition_penalty=penalty,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def decode(name: str, target: Any, drafter: Any = None, params: Any = LIVELY) -> list[list[int]]:
    engine = Engine(target, drafter, prefill_chunk=4, adaptive=False)
    return [g.tokens for g in engine.generate(PROMPTS, params, sources=sources_of(name))]


def trees(outputs: list[list[int]]) -> RandomTrees:
    return RandomTrees(dict(zip(map(tuple, PROMPTS), outputs, strict=True)))


@pytest.mark.parametrize(("name", "attention"), SEQ2SEQ_RUNS)
def test_greedy(name: str, attention: str) -> None:
    expected = generated(name, attention)
    assert all(len(set(output)) > 8 for output in expected), "the random model loops"
    assert len(set(map(tuple, expected))) == len(expected)
    target = Target(model_of(name, attention))
    for drafter in (None, LOOKAHEAD):
        assert decode(name, target, drafter) == expected, drafter
    random_trees = trees(expected)
    assert decode(name, target, random_trees) == expected
    assert len(random_trees.scattered) > 10, "too few accepted paths had gaps"
    plain = generated(name, attention, penalty=1.0)
    for drafter in (None, LOOKAHEAD, trees(plain)):
        assert decode(name, target, drafter, GREEDY) == plain, drafter


@pytest.mark.parametrize("name", one_in(3, SEQ2SEQ_FAMILIES))
def test_one_at_a_time(name: str) -> None:
    """No padding, and masks left to the model where they may be; then slots that others leave and join."""
    expected = generated(name, "sdpa")
    engine = Engine(Target(model_of(name, "sdpa"), check=False), trees(expected), adaptive=False)
    sources = sources_of(name)
    for prompt, source, tokens in zip(PROMPTS, sources, expected, strict=True):
        assert engine.generate([prompt], LIVELY, sources=[source])[0].tokens == tokens
    first = [
        engine.add(prompt, LIVELY, source=source) for prompt, source in zip(PROMPTS, sources, strict=True)
    ]
    engine.step()
    engine.remove(first[0])  # the last one moves into its slot, and its source with it
    late = engine.add(PROMPTS[0], LIVELY, source=engine.target.encode(sources[0]))
    while engine.sequences:
        engine.step()
    assert [s.output for s in (late, *first[1:])] == expected


@pytest.mark.parametrize("name", one_in(3, SEQ2SEQ_FAMILIES, 1))
def test_sampled(name: str) -> None:
    target = Target(model_of(name, "sdpa"), check=False)
    plain = decode(name, target, params=SAMPLED)
    assert plain != generated(name, "sdpa")
    assert decode(name, target, trees(plain), SAMPLED) == plain
    assert decode(name, target, "lookahead:window=4,ngram=3,guesses=3", SAMPLED) == plain


@pytest.mark.parametrize("name", one_in(3, SEQ2SEQ_FAMILIES, 2))
def test_float32(name: str) -> None:
    """Rows of a wide forward differ by rounding: near-ties may flip."""
    model = SEQ2SEQ_FAMILIES[name].build(torch.float32)
    target = Target(model)
    plain = decode(name, target)
    drafted = decode(name, target, trees(plain))
    for place, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        if one != other:
            flip = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            source = target.encode(sources_of(name)[place])
            text = PROMPTS[place] + one[:flip]
            best = target._plain(source, text)[-1].topk(2).values  # type: ignore[attr-defined]
            margin = float(best[0] - best[1])
            print(f"{name}: flipped at output token {flip}, margin {margin:.3g}")
            assert margin < 1e-4
