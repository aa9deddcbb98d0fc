"""SmolLM2 as llama.cpp itself quantises it: every type has the bits that the page on GGUF states.

`make real` fetches it, `make test-llamacpp-real` runs these tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

from gguf_types import BEGIN, END, PAGE, how, smollm2
from outpace.core import SamplingParams
from outpace.embedded import smollm2_path
from outpace.engine.engine import Engine
from outpace.targets import Target
from outpace.targets.hardware import processor
from outpace.testing.gguf import FILE_TYPES, quantise

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not smollm2_path().is_dir(), reason="SmolLM2 is not here; make real fetches it"),
]

TEXTS = [
    "Tom has 3 boxes of 12 apples. He gives 5 apples to Ann. How many apples are left?",
    "A train travels 60 miles in an hour and a half. How far does it travel in four hours?",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return",
    "Repeat this sentence twice: The quick brown fox jumps over the lazy dog.",
    "Name three rivers of Europe and the cities they flow through.",
    "Once upon a time there was a time when all the animals of the wood could speak, and",
    "Translate to French: Good morning, my friends. How are you today?",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
]
SAMPLINGS = [
    SamplingParams(max_new_tokens=32, ignore_eos=True, logprobs=1),
    SamplingParams(max_new_tokens=32, temperature=0.8, seed=5, ignore_eos=True, logprobs=1),
    SamplingParams(max_new_tokens=32, temperature=1.2, top_p=0.95, seed=6, ignore_eos=True, logprobs=1),
]
K_TYPES = ("q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_xs")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2(tmp_path_factory.mktemp("gguf") / "smollm2.gguf")


@pytest.fixture(scope="module", params=FILE_TYPES)
def target(request: Any, source: Path) -> Iterator[Any]:
    path = quantise(source, request.param, source.with_name(f"{request.param}.gguf"))
    yield Target(path, threads=1, repack=False)
    path.unlink()


def test_types_are_exact_as_the_page_states(target: Any) -> None:
    assert target.bit_exact and not target.why_inexact
    kind = target.path.stem
    table = PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0]
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {kind} |")]
    _, _, exact, rows, repacked, *_ = [cell.strip() for cell in line.split("|")]
    assert exact == "yes"
    if f"on {processor()}," in table and repacked == "no":  # other processors have other limits
        assert rows == how(target)


def test_drafts_change_no_bit(target: Any) -> None:
    if target.path.stem not in K_TYPES:
        pytest.skip("of the K-types alone, for time")
    prompts = [target.tokenizer(text).input_ids for text in TEXTS]
    for params in SAMPLINGS:
        plain = [Engine(target).generate([prompt], params)[0] for prompt in prompts]
        for drafter in ("suffix", "lookahead"):
            engine = Engine(target, drafter, adaptive=False, slots=4)
            found = engine.generate(prompts, params)
            assert [one.tokens for one in found] == [one.tokens for one in plain]
            assert [one.logprobs for one in found] == [one.logprobs for one in plain]
            assert sum(one.stats.accepted for one in found) > 0
