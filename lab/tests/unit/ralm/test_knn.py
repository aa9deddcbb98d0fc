"""KNN-LM: the mixture is the paper's, every drafter keeps its tokens, and a step searches once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters import load_drafter
from outpace.draws.noise import Key, gumbel
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.ralm import KnnStore, KnnTarget

TEXTS = [[place * step % 29 + 2 for place in range(40)] for step in (3, 5, 7)]
PROMPT = [5, 3, 9, 12]
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.9, seed=4, ignore_eos=True)
DRAFTERS = ["lookahead:window=3,ngram=3,guesses=3", "suffix", "token_recycling", "jacobi"]
OPTIONS: dict[str, Any] = {"neighbours": 4, "weight": 0.4, "temperature": 5.0}


def with_store(target: TargetModel) -> KnnTarget:
    return KnnTarget(target, KnnStore.of(target, TEXTS, length=16), **OPTIONS)


def states_and_logits(target: TargetModel, text: list[int]) -> tuple[Any, Any]:
    cache = target.new_cache(1, len(text))
    slot = target.open(cache)
    output = target.forward(cache, Batch.of({slot: text}), (-1,))
    return output.hidden_of(slot, 0, len(text))[-1].numpy(), output.logits_of(slot).numpy()


def as_published(inner: TargetModel, params: SamplingParams) -> list[int]:
    """KNN-LM a token at a time, by distances to every entry and by hand."""
    pieces = [text[at : at + 16] for text in TEXTS for at in range(0, len(text) - 1, 16)]
    entries = [
        (state, token)
        for piece in pieces
        for state, token in zip(states_and_logits(inner, piece)[0][:-1], piece[1:], strict=True)
    ]
    text = list(PROMPT)
    for index in range(params.max_new_tokens):
        states, logits = states_and_logits(inner, text)
        mixed = 0.6 * np.exp(logits[-1]) / np.exp(logits[-1]).sum()
        near = sorted((float(((state - states[-1]) ** 2).sum()), token) for state, token in entries)[:4]
        shares = np.exp([-(distance - near[0][0]) / 5.0 for distance, _ in near])
        for share, (_, token) in zip(shares / shares.sum(), near, strict=True):
            mixed[token] += 0.4 * share
        score = np.log(mixed)
        if not params.greedy:
            assert params.seed is not None
            noise = gumbel(Key(params.seed).target(index), len(score), torch.device("cpu"))
            score = score / params.temperature + noise.numpy()
        text.append(int(score.argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_the_text_is_that_of_the_paper_whatever_drafts(params: SamplingParams) -> None:
    target = Target(tiny_llama(layers=2, vocabulary=40))
    mixture = with_store(target)
    expected = as_published(target, params)
    assert Engine(target).generate([PROMPT], params)[0].tokens != expected
    assert Engine(mixture).generate([PROMPT], params)[0].tokens == expected
    for drafter in DRAFTERS:
        engine = Engine(mixture, drafter, adaptive=False)
        found = engine.generate([PROMPT, PROMPT[::-1]], params)
        assert found[0].tokens == expected and found[0].stats.drafted, drafter


def test_a_step_searches_once_for_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = with_store(ToyTarget())
    searched: list[int] = []
    search = KnnStore.search

    def counted(store: KnnStore, states: torch.Tensor, count: int) -> Any:
        searched.append(len(states))
        return search(store, states, count)

    monkeypatch.setattr(KnnStore, "search", counted)
    (found,) = Engine(mixture, "suffix", adaptive=False).generate([PROMPT], GREEDY)
    assert len(searched) <= found.stats.steps + 1 < len(found.tokens) and max(searched) > 1


@pytest.mark.slow
def test_drafters_keep_to_the_contract() -> None:
    check_drafter(load_drafter(DRAFTERS[0]), with_store(ToyTarget()))


def test_keys_are_the_states_before_the_tokens() -> None:
    target = Target(tiny_llama(layers=2, vocabulary=40))
    store = KnnStore.of(target, [TEXTS[0], [7]], length=64)
    assert store.tokens.tolist() == TEXTS[0][1:]
    states, logits = states_and_logits(target, TEXTS[0])
    torch.testing.assert_close(store.keys, torch.from_numpy(states[:-1]))
    with torch.no_grad():
        torch.testing.assert_close(target.head(store.keys), torch.from_numpy(logits[:-1]))
    distances, tokens = store.search(store.keys[3:4], 1)
    assert tokens.item() == TEXTS[0][4] and abs(distances.item()) < 1e-9


def test_keys_of_a_half_precision_model_are_kept_wider() -> None:
    """In bfloat16 the differences of distances would be lost, as sums of a state's squares are hundreds."""
    target = Target(tiny_llama(layers=2, vocabulary=40, dtype=torch.bfloat16), check=False)
    store = KnnStore.of(target, TEXTS)
    assert store.search(store.keys, 1)[0].abs().max() < 1e-4 * store.keys.square().sum(dim=1).max()
    cache = KnnTarget(target, store, **OPTIONS).new_cache(length=16)
    slot = cache.allocate()
    logits = KnnTarget(target, store, **OPTIONS).forward(cache, Batch.of({slot: PROMPT})).logits_of(slot)
    torch.testing.assert_close(logits.float().exp().sum(dim=-1), torch.ones(len(PROMPT)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neighbours": 0}, "neighbours must be from 1 to 117"),
        ({"neighbours": 118}, "not 118"),
        ({"weight": 1.0}, "weight must be at least 0 and below 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    target = ToyTarget()
    with pytest.raises(OutpaceError, match=message):
        KnnTarget(target, KnnStore.of(target, TEXTS), **options)


def test_a_store_of_another_model_or_of_nothing_is_refused() -> None:
    store = KnnStore.of(ToyTarget(), TEXTS)
    with pytest.raises(OutpaceError, match="make it with this model"):
        KnnTarget(Target(tiny_llama(layers=2, vocabulary=40)), store)
    with pytest.raises(OutpaceError, match="texts of at least two tokens"):
        KnnStore.of(ToyTarget(), [[3]])
