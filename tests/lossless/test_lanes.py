"""Sequences of very different lengths, in separate lanes, decode as each does alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from devices import DEVICES
from models import tiny_llama
from outpace.cache import KVCache, Slot, Window
from outpace.core import SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget, TargetModel
from outpace.testing import ToyTarget

# Short, long, and two that join while the others decode; all outgrow their first lane.
PROMPTS = [[5, 3], [(7 * i) % 31 + 1 for i in range(90)], [4, 4, 8] * 8, [9]]
GREEDY = SamplingParams(max_new_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=30, temperature=0.8, seed=7, ignore_eos=True)


def llama(device: str = "cpu") -> CausalTarget:
    return CausalTarget(tiny_llama(vocabulary=32, layers=3).to(device))


def toy(device: str) -> TargetModel:
    return ToyTarget(context=None)


CASES: dict[str, tuple[Any, Any]] = {
    "toy, plain": (toy, lambda: "none"),
    "toy, lookahead": (toy, lambda: "lookahead:window=4,ngram=3,guesses=4"),
    "toy, a draft model": (
        toy,
        lambda: DraftModel(ToyTarget(context=None, surprise=0.5), 3, branching="2x1"),
    ),
    "llama, lookahead": (llama, lambda: "lookahead:window=4,ngram=3,guesses=4"),
}


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small length classes, and few rows reserved ahead; filled with the number of lanes of each forward."""
    monkeypatch.setattr(KVCache, "_least_room", 8)
    monkeypatch.setattr("outpace.engine.scheduler._ANSWER", 4)
    monkeypatch.setattr("outpace.engine.scheduler._DRAFT", 4)
    counts: list[int] = []
    begin = KVCache.begin

    def spy(self: KVCache, widths: Mapping[Slot, int], *args: Any) -> list[Window]:
        found = begin(self, widths, *args)
        counts.append(len({id(window.lane) for window in found}))
        return found

    monkeypatch.setattr(KVCache, "begin", spy)
    return counts


def decode(target: TargetModel, drafter: Any, params: SamplingParams) -> list[list[int]]:
    engine = Engine(target, drafter, adaptive=False, length=8, prefill_chunk=20)
    sequences = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    for prompt in PROMPTS[2:]:
        engine.step()
        sequences.append(engine.add(prompt, params))
    while engine.sequences:
        engine.step()
    assert engine._batch.cache.reserved == 8  # memory is back to the start
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_each_alone(
    windows: list[int], case: str, params: SamplingParams, device: str
) -> None:
    make, drafter = CASES[case]
    target = make(device)
    alone = [Engine(target).generate([prompt], params)[0].tokens for prompt in PROMPTS]
    windows.clear()
    assert decode(target, drafter(), params) == alone
    assert max(windows) > 1
