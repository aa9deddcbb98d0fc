"""Interrupts of a model that llama.cpp runs: the engine's next call gives the right tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

from gguf_files import gguf_file
from interrupts import interrupt, lines, spread
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.targets import Target

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 3]]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
DRAFTERS = ["none", "lookahead:window=2,ngram=3", "token_recycling:max_nodes=8"]


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_interrupt_at_any_line(drafter: str, every: int) -> None:
    target = Target(gguf_file("float32"), threads=1)
    expected = [found.tokens for found in Engine(target).generate(PROMPTS, PARAMS)]
    engine = Engine(target, drafter, adaptive=False, prefix_cache=10**6)

    def call() -> list[list[int]]:
        return [found.tokens for found in engine.generate(PROMPTS, PARAMS)]

    assert call() == expected
    for line, time in spread(lines(call), every):
        interrupt(call, line, time)
        assert engine.sequences == []
        assert call() == expected, f"interrupted at {line}, the {time}. time"
        assert len(engine._batch.cache) == 0
