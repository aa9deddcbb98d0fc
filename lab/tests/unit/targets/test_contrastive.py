"""Contrastive decoding: correct by a separate reference, and the same tokens with every drafter."""

from __future__ import annotations

import functools
import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
import taught
from lossless.test_matrix import SPECS
from lossless.trained import with_trained
from models import tiny_llama
from outpace.cache import Slot
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.drafters import Drafter, load_drafter
from outpace.drafters.models.draft_model import DraftModel
from outpace.draws.noise import Key, gumbel
from outpace.engine.engine import Engine
from outpace.targets import Output, Rows, Target, TargetModel
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.targets import ContrastiveTarget
from parts import first
from stored import with_datastore

AMATEUR = ToyTarget(surprise=0.5)
PAIR = ContrastiveTarget(ToyTarget(), AMATEUR)
PROMPT = [5, 3, 9]
GREEDY = SamplingParams(max_new_tokens=30)
SAMPLED = SamplingParams(max_new_tokens=30, temperature=0.8, seed=4)
# A chain drawn by the amateur, and a tree that takes guesses from the contrasted logits.
TOY: list[Drafter[Any]] = [DraftModel(AMATEUR), load_drafter("lookahead:window=3,ngram=3,guesses=3")]

# They draft with the target itself.
OF_ONE_MODEL = ["self_speculative:skip=1", "early_exit", "parallel_tokens", "windowed"]
# Chains and trees that are copied, drafted by a model, and read from states; other drafters are slow.
KINDS = ("suffix", "draft_model", "draft_model, trees", "hydra", "spec_drafter")
OTHERS = {
    "blockwise": "blockwise:path={trained}",
    "cascade": "cascade:draft=(draft_model:num_speculative_tokens=4),inner=(prompt_lookup)",
    "spec_drafter": "spec_drafter:path={trained}",
}


def row_after(model: TargetModel, text: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Logits after a text that is fed at once to an empty cache, [vocabulary]."""
    cache = model.new_cache(1, len(text))
    slot = cache.allocate()
    found: np.ndarray[Any, np.dtype[np.float64]] = (
        model.forward(cache, Batch.of({slot: text})).logits_of(slot)[-1].numpy()
    )
    return found


def contrastive_text(
    expert: TargetModel, amateur: TargetModel, alpha: float, beta: float, params: SamplingParams
) -> list[int]:
    """Contrastive decoding as the papers write it, a token at a time and in probabilities."""
    text = list(PROMPT)
    for index in range(params.max_new_tokens):
        e, a = (
            np.exp(row) / np.exp(row).sum() for row in (row_after(expert, text), row_after(amateur, text))
        )
        score = (1 + beta) * np.log(e) - beta * np.log(a)
        score[e < alpha * e.max()] = -math.inf
        if not params.greedy:
            assert params.seed is not None
            noise = gumbel(Key(params.seed).target(index), len(score), torch.device("cpu"))
            score = score / params.temperature + noise.numpy()
        text.append(int(score.argmax()))
        if text[-1] in expert.eos_token_ids:
            break
    return text[len(PROMPT) :]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 0.5), (0.02, 2.0)])
def test_plain_contrastive_decoding_is_that_of_the_papers(
    alpha: float, beta: float, params: SamplingParams
) -> None:
    pair = ContrastiveTarget(PAIR.expert, AMATEUR, alpha, beta)
    expected = contrastive_text(PAIR.expert, AMATEUR, alpha, beta, params)
    assert Engine(pair).generate([PROMPT], params)[0].tokens == expected
    assert Engine(PAIR.expert).generate([PROMPT], params)[0].tokens != expected


@pytest.mark.parametrize("drafter", TOY, ids=lambda drafter: type(drafter).__name__)
@pytest.mark.slow
def test_drafters_keep_to_the_contract(drafter: Drafter[Any]) -> None:
    check_drafter(drafter, PAIR)


@pytest.mark.parametrize("drafter", TOY, ids=lambda drafter: type(drafter).__name__)
def test_drafts_are_accepted(drafter: Drafter[Any]) -> None:
    (generation,) = Engine(PAIR, drafter, adaptive=False).generate([PROMPT], GREEDY)
    assert generation.stats.accepted > 0


@pytest.fixture(scope="module")
def embedded() -> tuple[ContrastiveTarget, list[list[int]]]:
    paths = outpace.nano_path(), outpace.nano_draft_path()
    models = [Target(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)) for path in paths]
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    texts = [
        "def mean(values):\n    total = 0\n    for value in values:\n        ",
        "Question: Tom has 3 pens.",
    ]
    return ContrastiveTarget(*models), [tokenizer(text).input_ids for text in texts]


@functools.cache
def _plain(pair: ContrastiveTarget, prompts: tuple[tuple[int, ...], ...], params: SamplingParams) -> Any:
    return [generation.tokens for generation in Engine(pair).generate(prompts, params)]


def plain(pair: ContrastiveTarget, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    found: list[list[int]] = _plain(pair, tuple(map(tuple, prompts)), params)
    return found


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=20),
        pytest.param(SamplingParams(20, 0.9, seed=1), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", first(5, dict.fromkeys([*KINDS, *SPECS, *OTHERS])))
def test_embedded_pair_says_the_same_with_every_drafter(
    embedded: tuple[ContrastiveTarget, list[list[int]]], name: str, params: SamplingParams
) -> None:
    pair, prompts = embedded
    spec = with_trained(SPECS[name]) if name in SPECS else taught.with_trained(with_datastore(OTHERS[name]))
    found = Engine(pair, spec, adaptive=False).generate(prompts, params)
    assert [g.tokens for g in found] == plain(pair, prompts, params)


@pytest.mark.parametrize("spec", OF_ONE_MODEL)
def test_drafting_with_the_target_itself_is_refused(
    embedded: tuple[ContrastiveTarget, list[list[int]]], spec: str
) -> None:
    with pytest.raises(UnsupportedModel, match="a ContrastiveTarget"):
        Engine(embedded[0], spec)


def test_the_amateur_that_drafts_saves_steps(embedded: tuple[ContrastiveTarget, list[list[int]]]) -> None:
    pair, prompts = embedded
    params = SamplingParams(max_new_tokens=20)
    for generation in Engine(pair, DraftModel(pair.amateur), adaptive=False).generate(prompts, params):
        assert generation.stats.steps < generation.stats.tokens


def test_rows_cost_what_they_cost_on_the_experts_device() -> None:
    expert = ToyTarget()
    expert.device = torch.device("meta")
    pair = ContrastiveTarget(expert, ToyTarget())
    assert load_drafter("combined:(jacobi)+(lookahead)").prepare(pair).row_cost == 0.01


class Counting(ToyTarget):
    """Counts its forwards and the rows it is fed."""

    forwards = 0

    def forward(self, *args: Any, **options: Any) -> Output:
        self.forwards += 1
        return super().forward(*args, **options)


def test_forwards_of_a_step() -> None:
    """K drafted tokens take one forward of the expert and K + 1 of the amateur, as many as in the paper."""
    expert, amateur = Counting(), Counting(surprise=0.5)
    pair = ContrastiveTarget(expert, amateur)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    (generation,) = Engine(pair, DraftModel(amateur, num_speculative_tokens=3), adaptive=False).generate(
        [[4]], params
    )
    stats = generation.stats
    assert stats.steps < 30
    assert expert.forwards == stats.steps
    assert amateur.forwards == stats.steps + stats.drafted


def test_implausible_tokens_are_excluded() -> None:
    """Alpha 1 keeps only the expert's best token, whatever the amateur's logits."""
    strict = ContrastiveTarget(PAIR.expert, AMATEUR, alpha=1.0, beta=5.0)
    plain = Engine(PAIR.expert).generate([PROMPT], GREEDY)[0].tokens
    assert Engine(strict).generate([PROMPT], GREEDY)[0].tokens == plain
    sampled = SamplingParams(max_new_tokens=30, temperature=3.0, seed=1)
    assert Engine(strict).generate([PROMPT], sampled)[0].tokens == plain


def test_the_shorter_context_counts() -> None:
    pair = ContrastiveTarget(ToyTarget(context=64), ToyTarget(context=12))
    assert pair.context == 12
    (generation,) = Engine(pair, DraftModel(pair.amateur), adaptive=False).generate(
        [PROMPT], SamplingParams(ignore_eos=True)
    )
    assert (len(generation.tokens), generation.finish_reason) == (9, "length")


def test_its_costs_are_not_those_of_the_expert() -> None:
    """Recorded times of forwards are distinguished by the target's identity."""
    models = Target(tiny_llama()), Target(tiny_llama(layers=1))
    assert ContrastiveTarget(*models).identity not in (models[0].identity, models[1].identity)
    assert ContrastiveTarget(*models).identity != ContrastiveTarget(models[0], models[0]).identity


def test_hidden_states_are_the_experts() -> None:
    caches = [model.new_cache() for model in (PAIR, PAIR.expert)]
    own, alone = (cache.allocate() for cache in caches)
    pair = PAIR.forward(caches[0], Batch.of({own: PROMPT}), (1,))
    expert = PAIR.expert.forward(caches[1], Batch.of({alone: PROMPT}), (1,))
    assert torch.equal(pair.hidden[own][1], expert.hidden[alone][1])


def test_static_pair() -> None:
    models = [Target(tiny_llama(seed=seed), static=True) for seed in (0, 1)]
    grown = [Target(tiny_llama(seed=seed)) for seed in (0, 1)]
    params = SamplingParams(max_new_tokens=12)
    plain = Engine(ContrastiveTarget(*grown)).generate([PROMPT, [8]], params)
    engine = Engine(
        ContrastiveTarget(*models), "lookahead:window=3,ngram=3", slots=2, length=64, adaptive=False
    )
    assert [g.tokens for g in engine.generate([PROMPT, [8]], params)] == [g.tokens for g in plain]
    with pytest.raises(OutpaceError, match="static=True, or neither"):
        ContrastiveTarget(models[0], grown[1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"alpha": 0}, "alpha"),
        ({"alpha": 1.1}, "alpha"),
        ({"beta": -1}, "beta"),
        ({"beta": math.inf}, "beta"),
    ],
)
def test_values_out_of_range(options: dict[str, float], reason: str) -> None:
    with pytest.raises(OutpaceError, match=reason):
        ContrastiveTarget(ToyTarget(), AMATEUR, **options)


def test_vocabularies_must_be_the_same() -> None:
    with pytest.raises(OutpaceError, match="same vocabulary"):
        ContrastiveTarget(ToyTarget(vocabulary=40), AMATEUR)


def test_the_two_caches_stay_together() -> None:
    cache = PAIR.new_cache(slots=1, length=4)
    slots = [cache.allocate() for _ in range(3)]
    feeds = zip(slots, [Rows([1, 2, 3, 4, 5]), Rows([6, 7]), Rows([8, 9, 8], (-1, 0, 0))], strict=True)
    PAIR.forward(cache, Batch.of(dict(feeds)))
    cache.keep(dict(zip(slots, [range(5), range(2), (0, 2)], strict=True)))

    def lengths(slots: list[Slot]) -> list[int]:
        found = [cache.length(slot) for slot in slots]
        assert found == [cache.amateur.length(cache.beside[slot]) for slot in slots]
        return found

    assert lengths(slots) == [5, 2, 2]
    block = cache.read_rows(slots[1], 0, 2)
    cache.free(slots[0])
    cache.truncate(slots[2], 1)
    assert lengths(slots[1:]) == [2, 1]
    copied = cache.allocate()
    cache.write_rows(copied, block)
    assert lengths([*slots[1:], copied]) == [2, 1, 2]
    for name, model, store, own in (
        ("expert", PAIR.expert, cache.expert, [slots[2], copied]),
        ("amateur", AMATEUR, cache.amateur, [cache.beside[slots[2]], cache.beside[copied]]),
    ):
        found = model.forward(store, Batch.of({own[0]: [3], own[1]: [1]}))
        for slot, text in zip(own, ([8, 3], [6, 7, 1]), strict=True):
            alone = model.new_cache()
            fresh = alone.allocate()
            expected = model.forward(alone, Batch.of({fresh: text})).logits_of(fresh)
            assert torch.allclose(found.logits_of(slot)[0], expected[-1], rtol=0, atol=1e-12), name


def test_a_pair_may_be_half_of_a_pair() -> None:
    pair = ContrastiveTarget(PAIR, AMATEUR)
    plain = Engine(pair).generate([PROMPT], GREEDY)[0].tokens
    found = Engine(pair, "lookahead:window=3,ngram=3,guesses=3", adaptive=False).generate([PROMPT], GREEDY)
    assert found[0].tokens == plain != Engine(PAIR).generate([PROMPT], GREEDY)[0].tokens


def test_a_cache_of_another_target() -> None:
    with pytest.raises(OutpaceError, match="cache of its own"):
        PAIR.forward(ToyTarget().new_cache(), Batch.of({Slot(0): PROMPT}))


def test_the_example_gives_the_same_tokens_in_fewer_steps(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples" / "contrastive.py"
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    plain, fast = (int(steps) for steps in re.findall(r"in (\d+) steps", out))
    assert fast < plain
    assert "the same tokens: True" in out
