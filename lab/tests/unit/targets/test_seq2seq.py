"""Encoder-decoder models in what the laboratory makes of models: refused."""

from __future__ import annotations

import pytest

from outpace import Engine, Target, UnsupportedModel
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.models.draft_model import DraftModel
from outpace.testing import ToyTarget
from outpace_lab.drafters.cascade import Cascade
from outpace_lab.targets import ContrastiveTarget
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES


def test_it_does_not_draft_in_a_cascade() -> None:
    """Refused before anything is decoded, whatever the target."""
    model = SEQ2SEQ_FAMILIES["bart"].build()
    for target in (Target(model), ToyTarget()):
        with pytest.raises(UnsupportedModel, match=r"Bart.*encoder-decoder.*give a decoder-only model"):
            Engine(target, Cascade(DraftModel(model), PromptLookup()))


def test_it_is_no_half_of_a_contrastive_pair() -> None:
    target = Target(SEQ2SEQ_FAMILIES["bart"].build(), check=False)
    for pair in ((target, target), (ToyTarget(), target), (target, ToyTarget())):
        with pytest.raises(UnsupportedModel, match=r"decoder-only.*outpace\.Engine"):
            ContrastiveTarget(*pair)
