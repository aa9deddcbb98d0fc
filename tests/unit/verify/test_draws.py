"""The draws that the engine gives a verifier: separate keys, processors that run once, true prefixes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core import Generation, OutpaceError, SamplingParams
from outpace.drafters import DRAFTERS, load_drafter
from outpace.drafters.models.draft_model import DraftModel
from outpace.draws.logits import Logits
from outpace.draws.noise import Key, Stream
from outpace.engine.engine import Engine
from outpace.sequence import KeyedDraw, Sequence
from outpace.testing import ToyTarget
from outpace.verify import VERIFIERS, load_verifier
from parts import in_turn

PROMPTS = [[6, 1, 6, 1, 6, 1, 6], [*range(1, 9), *range(1, 9)], [5]]
GREEDY = SamplingParams(max_new_tokens=28)
SAMPLED = SamplingParams(max_new_tokens=28, temperature=1.0, seed=3)
LOSSLESS = [name for name in VERIFIERS if not load_verifier(name).lossy]
# Those that need nothing of a request; the others have tests of their own.
CHOOSING = [name for name in ("jacobi", "lookahead", "prompt_lookup") if name in DRAFTERS]


def decode(drafter: Any, verifier: str, params: SamplingParams) -> list[Generation]:
    return Engine(ToyTarget(), drafter, verifier, adaptive=False).generate(PROMPTS, params)


def sampler() -> DraftModel:
    return DraftModel(ToyTarget(surprise=0.5), num_speculative_tokens=4)


@pytest.mark.parametrize(("drafter", "verifier"), in_turn([*CHOOSING, "draft_model"], LOSSLESS))
def test_greedy_tokens_are_those_of_plain_decoding(drafter: str, verifier: str) -> None:
    chosen = sampler() if drafter == "draft_model" else load_drafter(drafter)
    if chosen.trees and load_verifier(verifier).chains:
        with pytest.raises(OutpaceError, match="verifies chains"):
            Engine(ToyTarget(), chosen, verifier)
        return
    for params in (GREEDY, SamplingParams(max_new_tokens=28, repetition_penalty=1.3)):
        found, plain = decode(chosen, verifier, params), decode(None, "match", params)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert sum(g.stats.steps for g in found) < sum(g.stats.steps for g in plain)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_stats_say_whether_the_verifier_is_lossy(verifier: str) -> None:
    found = decode(sampler(), verifier, SAMPLED)
    assert [g.stats.lossy for g in found] == [load_verifier(verifier).lossy] * len(PROMPTS)


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [("prompt_lookup", "rejection"), ("", "rejection"), ("", "block"), ("", "traversal")],
)
def test_no_two_draws_share_a_key(monkeypatch: pytest.MonkeyPatch, drafter: str, verifier: str) -> None:
    """In a whole generation: not those of two nodes, two steps or two purposes."""
    used: Counter[tuple[int, ...]] = Counter()
    own = Key.node

    def node(self: Key, stream: Stream, root: int, node: int) -> int:
        used[self.seed, stream, root, node] += 1
        return own(self, stream, root, node)

    monkeypatch.setattr(Key, "node", node)
    engine = Engine(ToyTarget(), load_drafter(drafter) if drafter else sampler(), verifier, adaptive=False)
    engine.generate(PROMPTS[1:2], SAMPLED)
    assert max(used.values()) == 1
    purposes = {stream for _, stream, _, _ in used}
    assert purposes == {Stream.ACCEPT, Stream.RESIDUAL} | (set() if drafter else {Stream.DRAFT})
    assert len({own(Key(3), *words[1:]) for words in used}) == len(used)


def test_the_targets_own_draws_share_no_key() -> None:
    key = Key(3)
    others = [key.node(stream, root, 0) for stream in Stream for root in range(8)]
    assert len({*others, *map(key.target, range(64))}) == len(others) + 64


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("verifier", [name for name in VERIFIERS if not load_verifier(name).ahead])
def test_a_processor_sees_each_true_prefix_once(verifier: str, params: SamplingParams) -> None:
    seen: list[list[int]] = []

    def record(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    prompt = PROMPTS[1]
    given = SamplingParams(**{**vars(params), "logits_processors": [record]})
    (found,) = Engine(ToyTarget(), load_drafter("prompt_lookup"), verifier, adaptive=False).generate(
        [prompt], given
    )
    assert found.stats.accepted > 0
    assert seen == [prompt + found.tokens[:place] for place in range(len(found.tokens))]


def test_processors_are_refused_by_a_verifier_that_looks_ahead() -> None:
    params = SamplingParams(max_new_tokens=4, logits_processors=[lambda input_ids, scores: scores])
    engine = Engine(ToyTarget(), sampler(), "block")
    with pytest.raises(OutpaceError, match="verifier='block' looks further ahead; use verifier='match'"):
        engine.generate(PROMPTS, params)
    assert not engine.sequences
    assert engine.generate(PROMPTS, GREEDY)[0].tokens


def _sequence(params: SamplingParams) -> Sequence:
    return Sequence([5, 6, 7], params, Key(1), limit=20)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_distributions_after_guesses_are_those_after_the_same_tokens_emitted(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4, top_k=9
    )
    logits = Logits(torch.randn(4, 12, generator=torch.Generator().manual_seed(0)))
    ahead, emitted = KeyedDraw(_sequence(params)), KeyedDraw(_sequence(params))
    guessed = [3, 6, 3]
    for node in range(-1, 3):
        expected = emitted.distribution(logits, node)
        assert torch.equal(ahead.distribution(logits, node, guessed[: node + 1]), expected)
        if node < 2:
            emitted.emit(guessed[node + 1], logits, node)
    if temperature:
        assert not torch.equal(
            ahead.distribution(logits, 2, guessed), ahead.distribution(logits, 2, [1, 1, 1])
        )


def test_processors_are_never_left_out_of_a_look_ahead() -> None:
    draw = KeyedDraw(_sequence(SamplingParams(logits_processors=[lambda input_ids, scores: scores])))
    with pytest.raises(OutpaceError, match="logits_processors see emitted tokens only"):
        draw.distribution(Logits(torch.zeros(2, 12)), 0, [4])


def test_greedy_point_masses_are_where_plain_decoding_is() -> None:
    """Also where float32 cannot distinguish the two best."""
    row = torch.zeros(1, 12, dtype=torch.float64)
    row[0, 4], row[0, 8] = 1.0, 1.0 + 1e-12
    draw = KeyedDraw(_sequence(SamplingParams()))
    assert draw.token(Logits(row), -1) == 8
    assert draw.distribution(Logits(row), -1).tolist() == [0.0] * 8 + [1.0] + [0.0] * 3
