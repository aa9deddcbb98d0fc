"""Every family: the engine's tokens are those of transformers' own generate, in float64.

``make test`` runs each family once, and each pair of attentions, dtypes, shapes and samplings with some
family; ``make test-slow`` runs all combinations. The drafter drafts random trees that hold the right
continuation among wrong siblings, so that in most steps the accepted path runs through rows that are not
contiguous and the cache moves them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from outpace import Engine, SamplingParams, Target
from outpace.core import Draft
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.sequence import Sequence, Step
from zoo.chain_families import CHAINS
from zoo.families import FAMILIES
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
def model_of(name: str, attention: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return FAMILIES[name].build(dtype, attention)


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


class Case(NamedTuple):
    """A family, and how it runs."""

    name: str
    attention: str
    dtype: torch.dtype
    static: bool
    sampled: bool


def cases() -> Iterator[Any]:
    """All cases; those in which a family meets a value of a factor that another of its cases has are slow."""
    for place, (name, family) in enumerate(FAMILIES.items()):
        attentions = ["sdpa", "eager"] if family.sdpa else ["eager"]
        # In the next families each factor is turned with others.
        turned = [bool(place >> factor & 1) for factor in range(4)]
        quick = Case(
            name,
            attentions[turned[0] % len(attentions)],
            (torch.float64, torch.float32)[turned[3] ^ turned[0]],
            turned[1] ^ turned[3],
            turned[2],
        )
        for values in product(attentions, (torch.float64, torch.float32), (False, True), (False, True)):
            case = Case(name, *values)
            parts = (
                name,
                case.attention,
                case.dtype,
                *(("static",) * case.static + ("sampled",) * case.sampled),
            )
            marks = () if case == quick else pytest.mark.slow
            yield pytest.param(
                case, marks=marks, id="-".join(str(part).removeprefix("torch.") for part in parts)
            )


@pytest.mark.parametrize("case", list(cases()))
def test_tokens_are_those_of_plain_decoding(case: Case) -> None:
    model = model_of(case.name, case.attention, case.dtype)
    target = Target(model, static=case.static)
    room = {"slots": 4, "length": 80} if case.static else {}
    params = SAMPLED if case.sampled else GREEDY
    plain = decode(target, params=params, **room)
    drafter = trees(plain)
    same(model, plain, decode(target, drafter, params, **room))
    assert len(drafter.scattered) > 10, "too few accepted paths had gaps"
    if case.dtype == torch.float64:
        expected = generated(case.name, case.attention)
        assert case.sampled == (plain != expected)


def same(
    model: Any, plain: list[list[int]], drafted: list[list[int]], prompts: list[list[int]] = PROMPTS
) -> None:
    """Compare tokens; in float32 one may flip at a near-tie, since rows of a wide forward round otherwise."""
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        if one != other:
            assert model.dtype == torch.float32
            place = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            best = model(input_ids=torch.tensor([prompt + one[:place]])).logits[0, -1].topk(2).values
            margin = float(best[0] - best[1])
            print(f"flipped at output token {place}, margin {margin:.3g}")
            assert margin < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_generate(name: str) -> None:
    attention = "sdpa" if FAMILIES[name].sdpa else "eager"
    expected = generated(name, attention)
    assert all(len(set(output)) > 8 for output in expected), "the random model loops"
    target = Target(model_of(name, attention), check=False)
    assert decode(target, Lookahead(window=4, ngram=3, guesses=3)) == expected
    # One at a time: no padding, masks left to the model where they may be.
    assert [Engine(target).generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS] == expected


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.sliding])
def test_window_matters(name: str) -> None:
    """The prompts reach past the window: a mask that forgot it would have failed above."""
    family = FAMILIES[name]
    wide = replace(family, options={**family.options, "sliding_window": 200})
    attention = "sdpa" if family.sdpa else "eager"
    assert decode(Target(wide.build(attention=attention), check=False)) != generated(name, attention)


@pytest.mark.parametrize("name", CHAINS)
def test_chains_in_float32(name: str) -> None:
    """In the dtype that transformers loads."""
    target = Target(CHAINS[name].load())
    plain = decode(target)
    same(target.model, plain, decode(target, trees(plain)))  # type: ignore[attr-defined]
