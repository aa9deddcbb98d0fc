"""Random encoder-decoder models as folders, and what transformers decodes with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from folders import byte_tokenizer
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES

TEXTS = ["abcabcabc", "the tin hat", "xyzxyz"]
NEW = 24


@pytest.fixture(scope="module", params=["t5", "bart"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, whose decoder BART forces to begin with a token of its config."""
    place: Path = tmp_path_factory.mktemp("models") / request.param
    family = SEQ2SEQ_FAMILIES[request.param]
    tokenizer = byte_tokenizer()
    options = {**family.options, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if request.param == "bart":
        options["forced_bos_token_id"] = 9
    model = type(family)(family.model, family.config, options).build(torch.float32)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(text) + "\n" for text in TEXTS), "utf-8")
    return file


def stock(folder: Path) -> list[list[int]]:
    """The output of transformers itself, without the tokens that the decoder is given."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    outputs = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=NEW + 1, do_sample=False)
        given = 1 if model.generation_config.forced_bos_token_id is None else 2
        outputs.append(output[0, given:].tolist()[:NEW])
    return outputs
