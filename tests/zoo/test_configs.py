"""Configs that lack what many have: a model of them works, or is refused with a text."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import outpace
from outpace.core import OutpaceError, UnsupportedModel
from zoo import image_families
from zoo.chain_families import CHAINS
from zoo.families import FAMILIES
from zoo.family import VOCABULARY, randomise
from zoo.seq2seq_families import CHAIN_FAMILIES, COUNTING_FAMILIES, SEQ2SEQ_FAMILIES

SEQ2SEQ = {**SEQ2SEQ_FAMILIES, **COUNTING_FAMILIES, **CHAIN_FAMILIES}
ALL = [*FAMILIES, *CHAINS, *SEQ2SEQ, *image_families.IMAGE_FAMILIES]
DEFAULT = ["gpt2", "mpt"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in DEFAULT]
LACKING = [
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
]
INNER = ("text_config", "encoder", "decoder")

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def model_of(name: str) -> PreTrainedModel:
    if name in image_families.IMAGE_FAMILIES:
        return image_families.build(name).float()
    return {**FAMILIES, **CHAINS, **SEQ2SEQ}[name].build(torch.float32)


def without(model: Any, name: str, absent: bool) -> bool:
    """Take an attribute out of a model's configs, or set it to None; returns False if none has it."""
    inner = [getattr(model.config, one, None) for one in INNER]
    configs = [one for one in (model.config, *inner, model.generation_config) if hasattr(one, "to_dict")]
    configs += [config.text_config for config in inner if hasattr(config, "text_config")]
    owners = [vars(config) for config in configs if name in vars(config)]
    for owner in owners:
        owner[name] = None
        if absent:
            del owner[name]
    return bool(owners)


@pytest.mark.parametrize("absent", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", [*DEFAULT, *SLOW])
def test_what_a_config_lacks(name: str, absent: bool) -> None:
    """accelerate, then a call as a user would make it; the stock one may refuse it too."""
    varied = 0
    for attribute in LACKING:
        model: Any = copy.deepcopy(model_of(name))
        if not without(model, attribute, absent):
            continue
        varied += 1
        try:
            outpace.accelerate(model)
        except OutpaceError as error:
            assert model.config.model_type in str(error) and len(str(error)) > 60
            continue
        ids = torch.tensor([[5, 9, 11, 3, 7, 5, 9]])
        given = {"input_features": torch.randn(1, 8, 24)} if name == "whisper" else {"input_ids": ids}
        given["attention_mask"] = torch.ones_like(ids)
        options = {"max_new_tokens": 3, "do_sample": False, "decoder_start_token_id": 2}
        try:
            expected = type(model).generate(model, **given, **options).tolist()
        except Exception:
            continue
        assert model.generate(**given, **options).tolist() == expected, attribute
    assert varied > 1


DORY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_input_layers": 1,
    "n_output_layers": 1,
    "sliding_window": 8,
}


@pytest.mark.skipif(not hasattr(transformers, "DoryConfig"), reason="transformers has no Dory yet")
@pytest.mark.parametrize("loops", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_layers_in_loops(loops: int) -> None:
    """Each loop has rows of its own in the cache; where the last alone keeps them, the model is refused."""
    model: Any = transformers.DoryForCausalLM(transformers.DoryConfig(**DORY, n_recurrent_loops=loops))
    model = model.double().eval()
    randomise(model, 0)
    ids = torch.tensor([[5, 9, 11, 3, 7] * 3])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "repetition_penalty": 3.0}
    expected = model.generate(ids, **options)
    outpace.accelerate(model, "lookahead:window=4,ngram=3,guesses=3", adaptive=False)
    assert model.generate(ids, **options).tolist() == expected.tolist()
    outpace.Target(copy.deepcopy(outpace.restore(model)).float())  # its self-test runs layers one by one
    vars(model.config)["recurrent_kv_cache_mode"] = "last_loop"
    if loops == 1:
        outpace.Target(model)
    else:
        with pytest.raises(UnsupportedModel, match=r"dory.*'last_loop'"):
            outpace.Target(model)
