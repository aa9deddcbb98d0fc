"""Muse's assistant, a DFlash in transformers' own layout: its drafts are those of transformers."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from outpace import Engine, SamplingParams, Target
from outpace.core import OutpaceError
from outpace.drafters.blocks.dflash import DFlash
from outpace.drafters.blocks.dflash_module import DFlashModule
from outpace.targets import TargetModel
from zoo.family import VOCABULARY, WINDOW, randomise

NEW, BLOCK = 24, 5
PROMPTS = [random.Random(length).choices(range(VOCABULARY), k=length) for length in (21, 5, 30)]
GREEDY = SamplingParams(max_new_tokens=NEW)
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=0.8, seed=5)
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@cache
def muse() -> TargetModel:
    config = MuseGlimmerConfig(
        text_config={**_SIZES, "vocab_size": VOCABULARY, "num_hidden_layers": 4},
        vision_config=_VISION,
        out_hidden_size=16,
        projector_hidden_size=16,
    )
    config.vision_config.out_hidden_size = 16
    model = MuseGlimmerForConditionalGeneration(config).double().eval()
    randomise(model, 0)
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return Target(model)


def assistant(folder: Path, **changes: Any) -> Any:
    """Write an assistant with random weights, in float64."""
    given = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "block_size": BLOCK,
        "mask_token_id": VOCABULARY - 1,
        "target_layer_ids": [0, 2, 3],
    }
    made = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**{**_SIZES, **given, **changes}))
    randomise(made.double().eval(), 1)
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, params: SamplingParams) -> None:
    assistant(tmp_path)
    plain = [found.tokens for found in Engine(muse()).generate(PROMPTS, params)]
    engine = Engine(muse(), f"dflash:path={tmp_path}", adaptive=False, prefill_chunk=7)
    early = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    engine.step()
    late = engine.add(PROMPTS[2], params)
    while engine.sequences:
        engine.step()
    assert [sequence.output for sequence in (*early, late)] == plain


def test_drafts_and_accepted_lengths_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the window, whose layers see a part of the text; the embeddings are those before Muse's norm."""
    made, model = assistant(tmp_path), muse().model
    theirs: list[tuple[int, list[int]]] = []
    ours: list[tuple[int, list[int]]] = []
    stock, propose = DFlashTokenCandidateGenerator.get_candidates, DFlash.propose

    def candidates(self: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        found = stock(self, input_ids, *args, **options)
        if drafted := found[0][0, input_ids.shape[1] :].tolist():
            theirs.append((input_ids.shape[1], drafted))
        return found

    def proposed(self: Any, states: Any) -> Any:
        found = propose(self, states)
        ours.extend((len(s.sequence.tokens), list(d.tokens)) for s, d in zip(states, found, strict=True))
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", candidates)
    monkeypatch.setattr(DFlash, "propose", proposed)
    for prompt in PROMPTS:
        theirs.clear()
        ours.clear()
        ids = torch.tensor([prompt])
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=made,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=NEW,
        )[0].tolist()
        (found,) = Engine(muse(), f"dflash:path={tmp_path},max_nodes=0", adaptive=False).generate(
            [prompt], GREEDY
        )
        assert prompt + found.tokens == text
        # transformers drafts beyond the last token allowed.
        whole = [one for one in theirs if one[0] + BLOCK <= len(text)]
        drafted = [one for one in ours if one[1]]
        assert drafted[: len(whole)] == whole and len(whole) > 10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token_id": VOCABULARY}, "mask_token_id .*, 96, is not a token"),
        ({"target_layer_ids": [0, 4, 3]}, r"layers \[1, 5\], but this one has 4"),
        ({"hidden_size": 48}, "hidden size of 48, but this target, .*, has 32"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_one_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assistant(tmp_path, **changes)
    with pytest.raises(OutpaceError, match=f"dflash: .*{words}"):
        Engine(muse(), f"dflash:path={tmp_path}")


def test_windows_are_not_lost_in_another_format(tmp_path: Path) -> None:
    assistant(tmp_path)
    with pytest.raises(OutpaceError, match="keep its folder"):
        DFlashModule.load(tmp_path, muse()).save(tmp_path / "saved")
