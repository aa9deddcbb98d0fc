"""Requests choose their drafter: all sequences share a forward, with the tokens of plain decoding."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest

from outpace.core import OutpaceError, SamplingParams, Speculation
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.policy.governor import Governor
from outpace.sequence import Sequence
from outpace.targets.rows import Output
from outpace.testing import ToyTarget

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 8), *range(1, 8), *range(1, 4)]]
PARAMS = [
    SamplingParams(max_new_tokens=24, ignore_eos=True),
    SamplingParams(max_new_tokens=24, temperature=1.0, seed=3, ignore_eos=True),
]
DRAFTERS: dict[str, Any] = {
    "copy": "prompt_lookup:branches=2",
    "model": DraftModel(ToyTarget(surprise=0.7), 3),
    "window": "lookahead:window=3,ngram=3",
}
CHOICES = [None, "off", *DRAFTERS, Speculation("model", 1), Speculation(num_speculative_tokens=0)]


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    return Engine(ToyTarget(context=None)).generate([prompt], params)[0].tokens


class Counting(ToyTarget):
    forwards = 0

    def forward(self, *args: Any, **options: Any) -> Output:
        self.forwards += 1
        return super().forward(*args, **options)


@pytest.mark.parametrize("adaptive", [False, "auto"])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_different_drafters_ride_in_one_forward(params: SamplingParams, adaptive: Any) -> None:
    target = Counting(context=None)
    engine = Engine(target, "jacobi", drafters=DRAFTERS, adaptive=adaptive)
    asked = [(prompt, replace(params, speculation=choice)) for prompt in PROMPTS[2:] for choice in CHOICES]
    found = engine.generate([prompt for prompt, _ in asked], [own for _, own in asked])
    for (prompt, own), generation in zip(asked, found, strict=True):
        assert generation.tokens == alone(tuple(prompt), params), own.speculation
        stats, most = generation.stats, own.drafts.num_speculative_tokens
        if own.speculation == Speculation("off") or most == 0:
            assert stats.drafted == 0
        elif not adaptive:
            assert 0 < stats.drafted <= (most or 64) * stats.steps
    assert target.forwards <= max(g.stats.steps for g in found) + 2
    assert adaptive or any(g.stats.accepted for g in found)


def test_batches_in_which_all_differs() -> None:
    """Drafters, chunks, rows of the prefix cache, failures, cancelled ones, and ones that give way."""
    target = ToyTarget(context=None)
    memory = 1600 * target.new_cache().row_bytes
    engine = Engine(
        target, "jacobi", drafters=DRAFTERS, memory=memory, prefix_cache=1 << 22, prefill_chunk=16
    )
    start = [1 + 7 * place % 31 for place in range(70)]

    def fails(tokens: list[int]) -> bool:
        if len(tokens) > 80:
            raise RuntimeError("on purpose")
        return False

    sequences: list[Sequence] = []
    kinds = itertools.cycle(["whole", "whole", "fails", "cancelled", "whole"])
    choices, chosen = itertools.cycle(CHOICES), []
    for count in range(20):
        params = replace(PARAMS[count % 2], speculation=next(choices))
        kind = next(kinds)
        prompt = [*start[: 70 - count % 3], count + 1, count + 2] if count % 4 else PROMPTS[count // 4 % 4]
        sequences.append(engine.add(prompt, params, criteria=fails if kind == "fails" else None))
        chosen.append(kind)
        for _ in range(3):
            engine.step()
        if kind == "cancelled":
            engine.remove(sequences[-1])
        assert engine._batch.cache.reserved <= 1600
    while engine.sequences:
        engine.step()
    for sequence, kind in zip(sequences, chosen, strict=True):
        expected = alone(tuple(sequence.prompt), replace(sequence.params, speculation=None))
        assert sequence.output == expected[: len(sequence.output)]
        if kind == "whole":
            assert sequence.output == expected
    assert {"error", "length", "removed"} <= {sequence.finish_reason for sequence in sequences}
    assert any(sequence.stats.cached_tokens for sequence in sequences)
    assert len(engine._batch.cache) == 0


def test_each_drafter_has_its_own_record() -> None:
    engine = Engine(ToyTarget(), "jacobi", drafters=DRAFTERS)
    policies = [drafting.policy for name, drafting in engine._draftings.items() if name != "off"]
    assert all(isinstance(policy, Governor) for policy in policies)
    assert len({id(policy) for policy in policies}) == 4
    assert engine._draftings["off"].policy is None


def test_what_is_wrong_is_refused() -> None:
    engine = Engine(ToyTarget(), drafters={"copy": "prompt_lookup"})
    with pytest.raises(OutpaceError, match=r"names 'eagle'.*'off', 'copy'"):
        engine.add([1], SamplingParams(speculation="eagle"))
    with pytest.raises(OutpaceError, match="does not read references"):
        engine.add([1], SamplingParams(speculation="copy"), references=[[1]])
    with pytest.raises(OutpaceError, match="num_speculative_tokens must be"):
        Speculation(num_speculative_tokens=-1)
    with pytest.raises(OutpaceError, match="names a drafter"):
        SamplingParams(speculation=3)  # type: ignore[arg-type]
    with pytest.raises(OutpaceError, match="other than 'off'"):
        Engine(ToyTarget(), drafters={"off": "jacobi"})
    with pytest.raises(OutpaceError, match="verifies chains"):
        Engine(ToyTarget(), verifier="block", drafters={"window": "lookahead"})


REMEMBERING = ["suffix", "token_recycling", "combined:parts=(suffix)+(token_recycling)"]


@pytest.mark.parametrize("drafter", REMEMBERING)
def test_who_shares_what_is_remembered(drafter: str) -> None:
    """A request that repeats an earlier one takes fewer steps, if it may see what that one left."""
    engine = Engine(ToyTarget(), drafter, adaptive=False)

    def steps(memory: str | None) -> int:
        params = SamplingParams(
            max_new_tokens=60,
            temperature=1.0,
            seed=5,
            ignore_eos=True,
            speculation=Speculation(memory=memory),
        )
        (found,) = engine.generate([[3, 4]], params)
        assert found.tokens == plain
        return found.stats.steps

    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    plain = Engine(ToyTarget()).generate([[3, 4]], params)[0].tokens
    alone = steps("off")
    assert steps("off") == alone
    assert steps("mine") == alone
    assert steps("mine") < alone
    assert steps("yours") == alone
    assert steps("off") == alone
    assert steps(None) == alone
    assert steps(None) < alone
    for other in range(16):
        steps(f"tenant {other}")
    assert steps("mine") == alone, "the least recently used name is forgotten"


@pytest.mark.parametrize("memory", ["", 3, True])
def test_a_wrong_memory_is_refused(memory: Any) -> None:
    with pytest.raises(OutpaceError, match="memory must be None, 'off' or a name"):
        Speculation(memory=memory)
