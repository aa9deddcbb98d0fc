"""The drift of an output: places changed, and its loss under the target."""

from __future__ import annotations

import pytest

from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.targets.ties import margin, parting
from outpace.testing import ToyTarget
from outpace.verify import Verifier
from outpace_lab import drift
from outpace_lab.drift import Drift, measure_drift, negative_log_likelihood
from outpace_lab.verify.lossy import BiLD, TopBeta, Typical

PROMPT = [3, 9, 2, 7]
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 512])
@pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT])
def test_the_loss_is_that_of_the_engines_log_probabilities(
    monkeypatch: pytest.MonkeyPatch, prompt: list[int], chunk: int
) -> None:
    """Those come from the rows of wide forwards, the loss from the text fed as one chain, in chunks."""
    (found,) = Engine(ToyTarget(), "lookahead:window=3,ngram=3", adaptive=False).generate([prompt], SAMPLED)
    assert found.logprobs is not None
    monkeypatch.setattr(drift, "_CHUNK", chunk)
    loss = negative_log_likelihood(ToyTarget(), prompt, found.tokens)
    # The engine reports log probabilities of float32 logits.
    assert loss == pytest.approx(-sum(entry.logprob for entry in found.logprobs), rel=1e-5)
    assert negative_log_likelihood(ToyTarget(), prompt, []) == 0


def test_places_are_compared_to_the_end_of_the_longer_output() -> None:
    target = ToyTarget()
    found = measure_drift(target, PROMPT, [1, 2, 3, 4], [1, 5, 3])
    assert (found.plain_tokens, found.tokens, found.places, found.changed) == (4, 3, 4, 2)
    assert found.share_changed == 0.5
    assert found.loss == pytest.approx(negative_log_likelihood(target, PROMPT, [1, 5, 3]) / 3)
    assert found.plain_loss == pytest.approx(negative_log_likelihood(target, PROMPT, [1, 2, 3, 4]) / 4)
    assert measure_drift(target, PROMPT, [], []) == Drift()
    assert Drift().loss == Drift().plain_loss == Drift().share_changed == 0


@pytest.mark.parametrize(
    ("plain", "output", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_where_outputs_part(plain: list[int], output: list[int], index: int | None) -> None:
    assert parting(plain, output) == index


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 512])
def test_the_margin_is_between_the_two_best_of_the_next_token(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    params = SamplingParams(max_new_tokens=1, logprobs=2, ignore_eos=True)
    (found,) = Engine(ToyTarget()).generate([PROMPT], params)
    assert found.logprobs is not None
    best, second = sorted(found.logprobs[0].top.values(), reverse=True)
    monkeypatch.setattr(drift, "_CHUNK", chunk)
    assert margin(ToyTarget(), PROMPT) == pytest.approx(best - second, rel=1e-4)
    with pytest.raises(OutpaceError, match="the prompt is empty"):
        margin(ToyTarget(), [])


def test_drifts_add_up() -> None:
    target = ToyTarget()
    one, two = measure_drift(target, PROMPT, [1, 2], [1, 5]), measure_drift(target, PROMPT, [4], [4, 4])
    both = one + two
    assert (both.plain_tokens, both.tokens, both.places, both.changed) == (3, 4, 4, 2)
    assert both.nats == one.nats + two.nats and both.plain_nats == one.plain_nats + two.plain_nats


def test_mistakes_are_refused() -> None:
    with pytest.raises(OutpaceError, match="the prompt is empty"):
        measure_drift(ToyTarget(), [], [1], [1])
    with pytest.raises(OutpaceError, match="takes no source"):
        measure_drift(ToyTarget(), PROMPT, [1], [1], source=[1])


@pytest.mark.parametrize("verifier", [TopBeta(5, 3.0), BiLD(5.0), Typical(0.02, 0.1)], ids=str)
def test_a_lossy_verifier_takes_fewer_steps_and_drifts(verifier: Verifier) -> None:
    """A draft model that often differs, whose tokens the verifier accepts."""
    from outpace.drafters.models.draft_model import DraftModel

    target, drafter = ToyTarget(), DraftModel(ToyTarget(surprise=0.5), num_speculative_tokens=4)
    prompts = [[token, token + 1] for token in range(1, 9)]
    params = SamplingParams(max_new_tokens=40, temperature=0.7, seed=1, ignore_eos=True)
    plain = Engine(target).generate(prompts, params)
    exact = Engine(target, drafter, adaptive=False).generate(prompts, params)
    found = Engine(target, drafter, verifier, adaptive=False).generate(prompts, params)
    assert all(g.stats.lossy for g in found) and not any(g.stats.lossy for g in exact)
    assert sum(g.stats.steps for g in found) < sum(g.stats.steps for g in exact)
    total = Drift()
    for prompt, one, other in zip(prompts, plain, found, strict=True):
        total += measure_drift(target, prompt, one.tokens, other.tokens)
    assert 0.1 < total.share_changed < 1
    assert 0 < total.loss < 5
