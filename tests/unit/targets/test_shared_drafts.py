"""Ranks that share drafts: the tokens and steps of one process, with fewer rows each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import outpace
from models import tiny_llama
from outpace.core import Generation, OutpaceError, SamplingParams, UnsupportedModel
from outpace.embedded import nano_drafter_path
from outpace.targets.ranks.led import LedTarget
from outpace.targets.ranks.shared_drafts import ParallelTarget, deal, typical
from outpace.targets.stock.causal import CausalTarget
from parts import in_turn
from ranks import with_ranks

PROMPTS = [[5, 9, 7, 31, 5, 9, 7], [*range(20, 32), 20, 21, 22], [3], [11, 12] * 9]
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=16),
    "sampled": SamplingParams(max_new_tokens=16, temperature=0.6, top_p=0.9),
    "penalties": SamplingParams(
        max_new_tokens=16, temperature=0.5, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={5: 0.5}
    ),
    "greedy penalties": SamplingParams(max_new_tokens=16, presence_penalty=0.3),
}
DRAFTERS = [
    "lookahead:window=5,ngram=4,guesses=4",
    "lookahead:window=4,ngram=3,guesses=3,refill=argmax",
    "jacobi:num_speculative_tokens=5",
    "prompt_lookup:num_speculative_tokens=4",
    "token_recycling:max_nodes=20,top_k=4",
    "combined:(prompt_lookup)+(token_recycling:max_nodes=12)+(lookahead:window=3,ngram=3,guesses=3)",
]


@pytest.fixture(scope="module")
def whole() -> CausalTarget:
    return CausalTarget(tiny_llama())


def params(sampling: str) -> list[SamplingParams]:
    return [replace(SAMPLINGS[sampling], seed=place) for place in range(len(PROMPTS))]


def outcome(generations: list[Generation]) -> list[tuple[list[int], int, int]]:
    return [(one.tokens, one.stats.steps, one.stats.accepted) for one in generations]


@pytest.mark.parametrize(("drafter", "sampling"), in_turn(DRAFTERS, SAMPLINGS))
def test_two_ranks_give_the_tokens_and_steps_of_one(whole: CausalTarget, drafter: str, sampling: str) -> None:
    expected = outpace.Engine(whole, drafter, adaptive=False).generate(PROMPTS, params(sampling))

    def use(target: LedTarget) -> list[Generation]:
        found = outpace.Engine(target, drafter, adaptive=False).generate(PROMPTS, params(sampling))
        traffic = target.inner.traffic  # type: ignore[attr-defined]
        assert traffic.shared > 0
        assert traffic.bytes > 0
        return found

    assert outcome(with_ranks(2, lambda: whole, use)) == outcome(expected)


@pytest.mark.parametrize("size", [3, 5])
def test_more_ranks_feed_fewer_rows_each(whole: CausalTarget, size: int) -> None:
    drafter = DRAFTERS[0]
    expected = outpace.Engine(whole, drafter, adaptive=False).generate(PROMPTS[:2], SAMPLINGS["greedy"])

    def use(target: LedTarget) -> list[Generation]:
        found = outpace.Engine(target, drafter, adaptive=False).generate(PROMPTS[:2], SAMPLINGS["greedy"])
        traffic = target.inner.traffic  # type: ignore[attr-defined]
        assert traffic.rows < 0.75 * traffic.whole
        return found

    assert outcome(with_ranks(size, lambda: whole, use)) == outcome(expected)


def test_narrow_steps_are_not_shared_and_equal_all_the_same(whole: CausalTarget) -> None:
    drafter = DRAFTERS[0]
    expected = outpace.Engine(whole, drafter, adaptive=False).generate(PROMPTS, params("sampled"))

    def use(target: LedTarget) -> list[Generation]:
        return outpace.Engine(target, drafter, adaptive=False).generate(PROMPTS, params("sampled"))

    assert outcome(with_ranks(2, lambda: whole, use, least=40)) == outcome(expected)


def test_requests_join_and_leave_and_share_prompts(whole: CausalTarget) -> None:
    """Prefixes are copied from sequences of which a rank had missed rows."""
    shared = [*range(1, 65), 5, 9]
    expected = outpace.Engine(whole, "none").generate([shared], SamplingParams(max_new_tokens=40))[0].tokens

    def use(target: LedTarget) -> None:
        engine = outpace.Engine(target, DRAFTERS[0], adaptive=False, prefix_cache=1 << 22, prefill_chunk=16)
        first = engine.add(shared, SamplingParams(max_new_tokens=40))
        gone = engine.add(PROMPTS[1], SamplingParams(max_new_tokens=40))
        while first.finish_reason is None:
            engine.step()
            if first.output_length > 5:
                engine.remove(gone)
        longer = [*shared, *expected[:20]]
        second = engine.generate([longer], SamplingParams(max_new_tokens=20))[0]
        assert first.output == expected
        assert second.stats.cached_tokens >= 64
        assert second.tokens == expected[20:]

    with_ranks(2, lambda: whole, use)


def test_what_needs_logits_is_refused_with_the_remedy(whole: CausalTarget) -> None:
    def use(target: LedTarget) -> None:
        engine = outpace.Engine(target, "prompt_lookup")
        with pytest.raises(OutpaceError, match="match"):
            engine.add([1], SamplingParams(logprobs=1))
        with pytest.raises(OutpaceError, match="match"):
            outpace.Engine(target, "none", "rejection")
        with pytest.raises(OutpaceError, match=r"early_exit|split"):
            outpace.Engine(target, "early_exit")
        with pytest.raises(OutpaceError, match="use a drafter without trained parts"):
            outpace.Engine(target, f"medusa:path={nano_drafter_path('medusa')}")
        with pytest.raises(UnsupportedModel, match="caches that grow"):
            ParallelTarget(CausalTarget(tiny_llama(), static=True), target.ranks)  # type: ignore[arg-type]

    with_ranks(2, lambda: whole, use)


def test_shares_are_closed_under_ancestors_and_cover_the_tree() -> None:
    choose = random.Random(0)
    for _ in range(50):
        parents = tuple(choose.randrange(-1, node) for node in range(choose.randrange(0, 40)))
        for size in (1, 2, 3, 8):
            shares = deal(parents, size)
            assert set().union(*shares) == set(range(len(parents)))
            for share in shares:
                assert all(parents[node] in (*share, -1) for node in share)


def test_a_window_is_dealt_out_evenly() -> None:
    sizes = [[len(share) for share in deal(typical(55), ranks)] for ranks in (1, 2, 4)]
    assert sizes[0] == [55]
    assert max(sizes[1]) <= 33
    assert max(sizes[2]) <= 20
