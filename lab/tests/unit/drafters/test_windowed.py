"""The target over the first and the last rows of its cache drafts for itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.drafters import load_drafter
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.drafters.cascade import Cascade
from outpace_lab.drafters.layers.windowed import Windowed
from parts import in_turn
from zoo.families import FAMILIES

PROMPTS = [random.Random(n).choices(range(1, 32), k=n) for n in (3, 61, 17, 30)]
LONG = SamplingParams(max_new_tokens=41, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=41, temperature=0.8, seed=3, ignore_eos=True)


@pytest.mark.parametrize(
    "drafter",
    [
        Windowed(1, 4),
        Windowed(2, 3, 1, "independent"),
        Windowed(1, 1, 7, "greedy"),
        Windowed(3, 9, 6, min_confidence=0.3),
    ],
)
@pytest.mark.slow
def test_it_keeps_the_contract(drafter: Windowed) -> None:
    check_drafter(drafter)


def llama(dtype: torch.dtype = torch.float64) -> Any:
    return tiny_llama(vocabulary=40, layers=3, dtype=dtype)


@pytest.mark.parametrize(
    ("drafter", "params"),
    in_turn([Windowed(1, 6, 3), Windowed(4, 12, 2), Windowed(2, 20, 1)], [LONG, SAMPLED]),
)
def test_tokens_are_those_of_plain_decoding(drafter: Windowed, params: SamplingParams) -> None:
    target = CausalTarget(llama())
    plain = Engine(target, slots=4).generate(PROMPTS, params)
    found = Engine(target, drafter, slots=4, adaptive=False, prefill_chunk=7).generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert all(g.stats.drafted > 0 for g in found)
    assert 0 < sum(g.stats.accepted for g in found) < sum(g.stats.drafted for g in found)


def last_row(model: Any, text: list[int], sinks: int, recent: int, positions: list[int]) -> torch.Tensor:
    """transformers' logits after a text whose last row does not attend to the middle of those before it."""
    seen = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    seen[-1, sinks : len(text) - 1 - recent] = False
    if getattr(model.config, "sliding_window", None):
        places = torch.tensor(positions)
        seen &= places[:, None] - places[None] < model.config.sliding_window
    found: torch.Tensor = model(
        torch.tensor([text]), attention_mask=seen[None, None], position_ids=torch.tensor([positions])
    ).logits[0, -1]
    return found


def drafting(target: CausalTarget, text: list[int], sinks: int, recent: int) -> torch.Tensor:
    """Logits of the drafting form of a target for the last token of a text."""
    cache = target.new_cache()
    slot = cache.allocate()
    target.forward(cache, Batch.of({slot: text[:-1]}))
    cache.keep({slot: range(len(text) - 1)})
    return target.over_window(sinks, recent).forward(cache, Batch.of({slot: text[-1:]})).logits_of(slot)[0]


MODELS = {
    "llama": llama,
    "mistral with a sliding window": lambda: FAMILIES["mistral"].build(torch.float64),
    "wide llama, fused": lambda: tiny_llama(vocabulary=40, heads=8, dtype=torch.float32),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_draft_sees_the_first_and_the_last_rows(name: str) -> None:
    model, text = MODELS[name](), PROMPTS[1]
    target = CausalTarget(model)
    with torch.inference_mode():
        for sinks, recent in ((1, 1), (1, 7), (5, 20), (2, 58), (30, 30)):
            found = drafting(target, text, sinks, recent)
            expected = last_row(model, text, sinks, recent, list(range(len(text))))
            assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
            full = last_row(model, text, len(text), 0, list(range(len(text))))
            hidden = len(text) - 1 - sinks - recent
            within = name.startswith("mistral") and recent + 1 >= model.config.sliding_window
            assert hidden <= 0 or within or not torch.allclose(found, full, atol=1e-2)


def test_a_text_within_the_window_is_not_drafted_for() -> None:
    (short,) = Engine(llama(), Windowed(4, 40), adaptive=False).generate([PROMPTS[0]], LONG)
    assert short.stats.drafted == 0 and short.stats.steps == 41
    (longer,) = Engine(llama(), Windowed(4, 36, 1), adaptive=False).generate([PROMPTS[0]], LONG)
    assert 0 < longer.stats.drafted <= 3


def test_nothing_of_a_draft_stays_in_the_cache() -> None:
    target = ToyTarget()
    engine = Engine(target, Windowed(1, 4, 6), adaptive=False)
    sequence = engine.add(PROMPTS[3], LONG)
    for _ in range(4):
        engine.step()
        assert sequence.place is not None
        assert sequence.place.rows == len(sequence.tokens) - 1


@pytest.mark.parametrize("options", ["sinks=0", "recent=0", "num_speculative_tokens=0", "draws=none"])
def test_invalid_options(options: str) -> None:
    with pytest.raises(OutpaceError, match="windowed"):
        load_drafter(f"windowed:{options}")


def test_what_it_cannot_draft_for() -> None:
    with pytest.raises(UnsupportedModel, match="leave static out"):
        Engine(CausalTarget(llama(), static=True), Windowed())
    compact = llama()
    compact.set_attn_implementation("outpace_tree")
    with pytest.raises(UnsupportedModel, match="attn_implementation='sdpa'"):
        Engine(CausalTarget(compact), Windowed())
    cascade = Cascade(DraftModel(ToyTarget(seed=1)), inner=Windowed(1, 4))
    with pytest.raises(OutpaceError, match="windowed drafts in the target's own cache"):
        Engine(ToyTarget(), cascade).generate([PROMPTS[3]], LONG)
