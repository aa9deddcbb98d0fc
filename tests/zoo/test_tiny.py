"""Every type of transformers that generates text is served, refused by name, or listed with a reason.

The served ones: tokens are those of transformers' generate(), and with random trees those of plain decoding.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

import outpace
from outpace import Engine, Target, nano_drafter_path
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.inputs.unloaded import KNOWN, refuse_unloaded
from zoo.every_type import (
    NOT_TEXT,
    OF_REFUSED,
    REFUSED,
    REFUSED_IN_PART,
    SOUND,
    TEXT_ALONE,
    auto_of,
    tested_elsewhere,
    walked,
)
from zoo.recurrent_families import REFUSED as IN_PART
from zoo.seq2seq_families import FURTHER_CHAINS, FURTHER_FAMILIES
from zoo.test_families import GREEDY, NEW, PROMPTS, SAMPLED, decode, same, trees
from zoo.test_seq2seq import LENGTHS, LIVELY, generated_by
from zoo.test_seq2seq import PROMPTS as STARTS
from zoo.test_seq2seq import trees as trees_after
from zoo.tiny import tiny_model
from zoo.tiny_families import CHAINED, QUICK, SEVERAL_STATES, TINY

pytestmark = pytest.mark.filterwarnings("ignore")

NOT_BUILT = {"diffusion_gemma"}  # what fills in blocks has no step of one token
BY_QUICK = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in TINY]


@cache
def model_of(kind: str) -> PreTrainedModel:
    model: Any = tiny_model(kind, {**TINY, **TEXT_ALONE}[kind], auto=auto_of(kind))
    # Published defaults of a few: beams, forced tokens, an end.
    model.generation_config = type(model.generation_config)(pad_token_id=0)
    vars(model.config.get_text_config(decoder=True))["eos_token_id"] = None  # Emu3 is made with one
    return model


def check_first_tokens(kind: str) -> None:
    """Plain decoding gives generate()'s tokens, and trees those of plain decoding, greedy and sampled."""
    model = model_of(kind)
    target = Target(model, check=False)
    assert bool(target.why_chains_only) == (kind in CHAINED)
    ids = torch.tensor([PROMPTS[1]])
    told = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    told = told[0, ids.shape[1] :].tolist()
    short = [dataclasses.replace(params, max_new_tokens=8) for params in (GREEDY, SAMPLED[0])]
    plain = [decode(target, params=params) for params in short]
    same(model, [told], [plain[0][1]], [PROMPTS[1]])
    for params, expected in zip(short, plain, strict=True):
        same(model, expected, decode(target, trees(expected), params))
    assert len({token for outputs in plain for output in outputs for token in output}) > 4


@pytest.mark.parametrize("kind", BY_QUICK)
def test_first_tokens(kind: str) -> None:
    check_first_tokens(kind)


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_a_table_of_inputs_for_all_layers(kind: str) -> None:
    """The self-test of replaced modules makes no model of some of the layers, and drafters cannot."""
    target = Target(model_of(kind), plan="packed")
    assert target.plan.packed
    with pytest.raises(UnsupportedModel, match="one table of inputs for all its layers"):
        target.some_layers([0])


@pytest.mark.parametrize("kind", ["gemma3n_text"])
def test_states_that_are_several(kind: str) -> None:
    assert kind in SEVERAL_STATES
    target = Target(model_of(kind), check=False)
    with pytest.raises(UnsupportedModel, match=r"several states of a row.*use one without trained parts"):
        Engine(target, f"medusa:path={nano_drafter_path('medusa')}")


@pytest.mark.parametrize(
    ("kind", "options"),
    [("lfm2_vl", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}), ("qwen3_5", {})],
)
def test_a_state_beside_images_is_refused_by_name(kind: str, options: dict[str, Any]) -> None:
    model = tiny_model(kind, {"text_config": options}, auto="AutoModelForImageTextToText")
    with pytest.raises(UnsupportedModel, match=rf"\({kind}\).* kept for text alone: load its language model"):
        Target(model)


@pytest.mark.parametrize("kind", ["glmasr", "qwen2_audio", "gemma3n"])
def test_sound_for_a_type_of_text_alone_is_refused_by_name(kind: str) -> None:
    model: Any = outpace.accelerate(model_of(kind))
    ids = torch.tensor([[5, 9, 3]])
    sound = {"input_features": torch.randn(1, 128, 16), "attention_mask": torch.ones_like(ids)}
    with pytest.raises(
        OutpaceError, match="the model argument input_features: pass input_ids, attention_mask"
    ):
        model.generate(ids, max_new_tokens=2, do_sample=False, **sound)
    outpace.restore(model)


def test_a_decoder_with_a_copy_of_the_config() -> None:
    """The self-test's window is that of the decoder too, where a model reads more than text."""
    assert not Target(model_of("mistral3")).why_chains_only


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXT_ALONE)
def test_first_tokens_of_text_alone(kind: str) -> None:
    check_first_tokens(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TINY, *TEXT_ALONE])
def test_whole_texts(kind: str) -> None:
    """Past any window, after the self-test, in prompts and outputs of many lengths."""
    model = model_of(kind)
    target = Target(model)
    for params in (GREEDY, SAMPLED):
        plain = decode(target, params=params)
        drafter = trees(plain)
        same(model, plain, decode(target, drafter, params))
        assert len(drafter.scattered) > 10 or target.why_chains_only
    for prompt, output in zip(PROMPTS, decode(target), strict=True):
        ids = torch.tensor([prompt])
        told = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        same(model, [told[0, len(prompt) :].tolist()], [output], [prompt])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FURTHER_FAMILIES, *FURTHER_CHAINS])
def test_encoder_decoders(name: str) -> None:
    """Tokens are those of generate(), one by one, and with random drafts."""
    family = {**FURTHER_FAMILIES, **FURTHER_CHAINS}[name]
    model = family.build(torch.float32)
    target = Target(model)
    assert bool(target.why_chains_only) == (name in FURTHER_CHAINS)
    sources = family.sources(LENGTHS)
    told = generated_by(model, sources)
    assert all(len(set(output)) > 8 for output in told), "the random model loops"
    for drafter in (None, trees_after(told)):
        engine = Engine(target, drafter, prefill_chunk=4, adaptive=False)
        found = [one.tokens for one in engine.generate(STARTS, LIVELY, sources=sources)]
        assert found == told


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_that_is_refused_is_refused_by_its_config(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"\({kind}\).*{REFUSED[kind]}"):
        refuse_unloaded(getattr(transformers, auto_of(kind)), CONFIG_MAPPING[kind]())


@pytest.mark.parametrize("kind", [*TINY, *TEXT_ALONE])
def test_a_type_that_is_served_is_not_refused_by_its_config(kind: str) -> None:
    refuse_unloaded(getattr(transformers, auto_of(kind)), CONFIG_MAPPING[kind]())


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*KNOWN} - NOT_BUILT))
def test_reasons_by_name_are_of_types_that_a_target_refuses(kind: str) -> None:
    """Without the name a target finds out by itself."""
    with pytest.raises(UnsupportedModel):
        Target(tiny_model(kind, OF_REFUSED.get(kind, {}), auto=auto_of(kind)))


def test_every_type_that_generates_text_is_known() -> None:
    listed: list[dict[str, Any]] = [TINY, TEXT_ALONE, REFUSED, REFUSED_IN_PART, NOT_TEXT]
    elsewhere = {*tested_elsewhere()} - {*TINY}  # where a type's decoder is tested here
    tables = [elsewhere, *({*table} for table in listed)]
    found = walked()
    assert len(found) > 250 and {"llama", "t5", "qwen2_vl"} <= found
    assert found - set().union(*tables) == set(), "neither served, refused, nor listed"
    for one, other in combinations(tables, 2):
        assert one & other == set()
    assert set().union(*listed) <= found, "listed, and unknown to transformers"
    assert {*QUICK} <= {*TINY} and {*SOUND} <= {*TEXT_ALONE}
    assert {*REFUSED_IN_PART} <= {*IN_PART}
