"""Draft models that fill masked places in one forward (PARD): their drafts, forwards and refusals."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from watching import Watch

MASK, TOKENS = 96, 5
PROMPTS = [[3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [5]]
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=1.0, seed=4)


@cache
def target() -> TargetModel:
    return Target(tiny_llama())


@cache
def pard() -> TargetModel:
    return Target(masked(MASK))


def masked(mask: Any, entry: str = "pard_token") -> Any:
    model = tiny_llama(layers=1, seed=1)
    setattr(model.config, entry, mask)
    return model


def plainly(text: list[int]) -> list[int]:
    """The vendor's draft: the best tokens of the last rows of one forward without a cache."""
    model: Any = pard().model
    with torch.no_grad():
        logits = model(torch.tensor([text + [MASK] * (TOKENS - 1)])).logits[0, -TOKENS:]
    best: list[int] = logits.argmax(-1).tolist()
    return best


def test_drafts_are_those_of_a_plain_computation() -> None:
    watch = Watch()
    engine = Engine(target(), DraftModel(pard(), TOKENS), adaptive=False, observer=watch)
    (found,) = engine.generate([PROMPTS[1]], GREEDY)
    text, compared = list(PROMPTS[1]), 0
    for step in watch.steps:
        if len(step.draft) == TOKENS:
            assert list(step.draft.tokens) == plainly(text)
            compared += 1
        text += step.tokens
    assert text == PROMPTS[1] + found.tokens and compared >= 5


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"branching": "2x2", "min_confidence": 0.01},
        {"expand": 3, "max_nodes": 9},
        {"draws": "independent"},
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding(options: dict[str, Any], params: SamplingParams) -> None:
    drafter = DraftModel(pard(), TOKENS, **options)
    engine = Engine(target(), drafter, adaptive=False)
    early = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    engine.step()
    late = engine.add(PROMPTS[2], params)
    while engine.sequences:
        engine.step()
    plain = Engine(target()).generate(PROMPTS, params)
    assert [one.output for one in (*early, late)] == [one.tokens for one in plain]
    assert all(one.stats.drafted > 20 for one in (*early, late))


def test_a_draft_is_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [0], pard().forward

    def forward(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        return real(*given, **named)

    engine = Engine(target(), DraftModel(pard(), TOKENS), adaptive=False)
    monkeypatch.setattr(pard(), "forward", forward)
    engine.add(PROMPTS[0], GREEDY)
    engine.add(PROMPTS[1], GREEDY)
    engine.step()
    calls[0] = steps = 0
    while engine.sequences:
        engine.step()
        steps += 1
    assert 5 < calls[0] <= steps


@pytest.mark.parametrize("entry", ["pard_token", "ptd_token_id"])
@pytest.mark.parametrize("mask", [97, -1, "96"])
def test_a_mask_that_is_no_token_is_refused(entry: str, mask: Any) -> None:
    with pytest.raises(OutpaceError, match=r"masked token in .* must be an id below 97, not .*; take"):
        Engine(target(), DraftModel(Target(masked(mask, entry), check=False)))
