"""Every family: the engine's tokens are those of transformers' own generate, in float64.

The drafter drafts random trees that hold the right continuation among wrong siblings, so that in most steps
the accepted path runs through rows that are not contiguous and the cache moves them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from outpace import Engine, SamplingParams, Target
from outpace.core import Draft
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.sequence import Sequence, Step
from zoo.chain_families import CHAINS
from zoo.families import FAMILIES, RUNS
from zoo.family import VOCABULARY

NEW = 26
PROMPTS = [random.Random(length).choices(range(VOCABULARY), k=length) for length in (21, 5, 30)]
GREEDY = SamplingParams(max_new_tokens=NEW)
SAMPLED = [SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=seed) for seed in (3, 1, 2)]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@dataclass(frozen=True, eq=False)
class RandomTrees(SequenceDrafter[Sequence]):
    """Random trees, the beginning of the right answer hidden in them; ``answers`` maps prompts to outputs."""

    answers: Mapping[tuple[int, ...], list[int]] = field(default_factory=dict)
    scattered: list[int] = field(default_factory=list)  # lengths of accepted paths with gaps

    def start(self, sequence: Sequence, shared: Any) -> Sequence:
        return sequence

    def draft(self, state: Sequence) -> Draft:
        rng = random.Random(1000 * len(state.tokens) + state.prompt_length)
        done = state.output_length
        right = self.answers[tuple(state.prompt)][done : done + rng.randrange(6)]
        tokens: list[int] = []
        parents: list[int] = []
        under = -1
        for node in range(rng.randrange(16)):
            if right and rng.random() < 0.5:
                tokens.append(right.pop(0))
                parents.append(under)
                under = node
            else:
                tokens.append(rng.randrange(VOCABULARY))
                parents.append(rng.randrange(-1, node))
        return Draft(tokens, parents)

    def learn(self, state: Sequence, step: Step) -> None:
        if step.path != list(range(len(step.path))):
            self.scattered.append(len(step.path))


@cache
def model_of(name: str, attention: str) -> PreTrainedModel:
    return FAMILIES[name].build(attention=attention)


@cache
def generated(name: str, attention: str) -> list[list[int]]:
    """transformers' own greedy output, one prompt at a time."""
    model = model_of(name, attention)
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def decode(target: Any, drafter: Any = None, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    engine = Engine(target, drafter, prefill_chunk=7, **{"adaptive": False, **options})
    return [generation.tokens for generation in engine.generate(PROMPTS, params)]


def trees(outputs: list[list[int]]) -> RandomTrees:
    return RandomTrees(dict(zip(map(tuple, PROMPTS), outputs, strict=True)))


@pytest.mark.parametrize(("name", "attention"), RUNS)
def test_greedy(name: str, attention: str) -> None:
    expected = generated(name, attention)
    assert all(len(set(output)) > 8 for output in expected), "the random model loops"
    target = Target(model_of(name, attention))
    assert decode(target) == expected
    assert decode(target, Lookahead(window=4, ngram=3, guesses=3)) == expected
    drafter = trees(expected)
    assert decode(target, drafter) == expected
    assert len(drafter.scattered) > 10, "too few accepted paths had gaps"
    # One at a time: no padding, masks left to the model where they may be.
    assert [Engine(target).generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS] == expected


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.sliding])
def test_window_matters(name: str) -> None:
    """The prompts reach past the window: a mask that forgot it would have failed above."""
    family = FAMILIES[name]
    wide = replace(family, options={**family.options, "sliding_window": 200})
    attention = "sdpa" if family.sdpa else "eager"
    assert decode(Target(wide.build(attention=attention))) != generated(name, attention)


@pytest.mark.parametrize(("name", "attention"), RUNS)
def test_sampled(name: str, attention: str) -> None:
    target = Target(model_of(name, attention), check=False)
    plain = decode(target, params=SAMPLED)
    assert plain != generated(name, attention)
    assert decode(target, trees(plain), params=SAMPLED) == plain


@pytest.mark.parametrize(("name", "attention"), RUNS)
def test_static(name: str, attention: str) -> None:
    expected = generated(name, attention)
    target = Target(model_of(name, attention), static=True)
    assert decode(target, trees(expected), slots=4, length=80) == expected


@pytest.mark.parametrize("name", [*FAMILIES, *CHAINS])
def test_float32(name: str) -> None:
    """In the dtype that transformers loads. Rows of a wide forward round otherwise: near-ties may flip."""
    target = Target({**FAMILIES, **CHAINS}[name].load())
    plain = decode(target)
    drafted = decode(target, trees(plain))
    for prompt, one, other in zip(PROMPTS, plain, drafted, strict=True):
        if one != other:
            place = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            text = torch.tensor([prompt + one[:place]])
            best = target.model(input_ids=text).logits[0, -1].topk(2).values  # type: ignore[attr-defined]
            margin = float(best[0] - best[1])
            print(f"{name}: flipped at output token {place}, margin {margin:.3g}")
            assert margin < 1e-4
