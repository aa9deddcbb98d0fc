"""An interrupt at any line of a step leaves the laboratory's drafters in order."""

from __future__ import annotations

import pytest

from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.models.draft_model import DraftModel
from outpace.testing import ToyTarget
from outpace_lab.drafters.cascade import Cascade
from unit.engine.test_interrupts import MANY, check_every_line, check_models_step, toy


@pytest.mark.parametrize("every", [MANY, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cascade(every: int) -> None:
    drafter = Cascade(DraftModel(ToyTarget(surprise=0.7), 3), PromptLookup())
    check_every_line(toy(drafter), "cascade", every)


@pytest.mark.parametrize("every", [MANY, pytest.param(1, marks=pytest.mark.slow)])
def test_some_layers(every: int) -> None:
    engine = toy("self_speculative:skip=1,num_speculative_tokens=3", adaptive=False)
    check_every_line(engine, "self_speculative", every)


@pytest.mark.parametrize("every", [2 * MANY, pytest.param(1, marks=pytest.mark.slow)])
def test_a_model_in_two_parts(every: int) -> None:
    check_models_step("llama", every, "early_exit:layers=1,min_confidence=0")
