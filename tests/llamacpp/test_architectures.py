"""Architectures other than plain attention: sliding windows, and states that cannot be undone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: make test-llamacpp")

from gguf_files import random_file
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.engine.engine import Engine
from outpace.targets import Target
from outpace.targets.llamacpp.library import LlamaContext, library

PROMPTS = [[3, 9, 27, 17, 51, 25, 11, 33] * 4, [5, 6, 7, 5, 6]]
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.5, seed=1)
DRAFTERS = ("lookahead:window=3,ngram=3,guesses=3", "token_recycling")


@lru_cache(maxsize=1)
def target() -> Any:
    return Target(random_file("gemma2"), threads=1)


def outputs(drafter: str | None) -> list[list[int]]:
    found = Engine(target(), drafter, adaptive=False).generate(PROMPTS, SAMPLED)
    assert drafter is None or sum(one.stats.accepted for one in found) > 0
    return [one.tokens for one in found]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_longer_than_a_sliding_window_decode_as_plainly(drafter: str) -> None:
    assert target().why_inexact and not target().bit_exact
    expected = outputs(None)
    assert outputs(drafter) == expected and all(len(set(text)) > 9 for text in expected)


def test_rejected_rows_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target()
    monkeypatch.setattr(LlamaContext, "remove", lambda *given: None)
    with pytest.raises(OutpaceError, match=r"llama\.cpp fails to decode"):
        outputs(DRAFTERS[0])


def test_a_split_file_decodes_as_the_whole_one() -> None:
    first = random_file("gemma2", split=8)
    assert len(list(first.parent.glob("gemma2-*-of-*.gguf"))) > 1
    parts = Engine(Target(first, threads=1), DRAFTERS[1]).generate(PROMPTS, SAMPLED)
    assert [one.tokens for one in parts] == outputs(None)


def test_a_recurrent_state_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="keeps a recurrent state, which cannot be undone"):
        Target(random_file("mamba"), threads=1)


@pytest.mark.parametrize(
    ("told", "answer", "message"),
    [
        ("llama_model_is_hybrid", True, "keeps a recurrent state, which cannot be undone"),
        ("llama_model_is_diffusion", True, "is a diffusion model"),
        ("llama_model_has_encoder", True, "has an encoder"),
        ("llama_model_has_decoder", False, "has an encoder"),
    ],
)
def test_kinds_that_cannot_be_decoded_are_refused(
    told: str, answer: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library(), told, lambda model: answer)
    with pytest.raises(UnsupportedModel, match=message):
        Target(random_file("gemma2"), threads=1)
