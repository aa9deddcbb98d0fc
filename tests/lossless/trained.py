"""Learned drafters for the embedded model, trained for a moment on its own words."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from learning import train
from lossless.prompts import PROMPTS
from outpace.core import SamplingParams
from outpace.drafters import LEARNED
from outpace.engine import Engine
from outpace.targets import TargetModel
from outpace.train.data import Document
from outpace.train.reading import read_batch

_FOLDER = tempfile.TemporaryDirectory(prefix="outpace-")  # goes when the tests end
# Few texts, so that a few seconds teach a drafter enough of them for its drafts to be accepted.
_TEXTS = 3
_STEPS = 40
_OPTIONS = {
    "dflash": {"tokens": 3},
    "parallel_tokens": {"num_lookahead": 2},
    "spec_drafter": {"tokens": 3},
}


def with_trained(spec: str) -> str:
    """The spec, ``{trained}`` in it replaced by the folder of such a drafter."""
    if "{trained}" not in spec:
        return spec
    return spec.replace("{trained}", str(trained(spec.partition(":")[0])))


@lru_cache
def trained(method: str) -> Path:
    """The folder of a method's drafter: enough for some drafts to be accepted, and no more."""
    target, texts = _material()
    cls = LEARNED[method]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = cls.new(cls.config_type(**_OPTIONS.get(method, {})), target)
    batch = read_batch(target, [texts], module.hidden_layers)
    train(module, batch, _STEPS, 3e-3)
    folder = Path(_FOLDER.name) / method
    module.save(folder)
    return folder


@lru_cache
def _material() -> tuple[TargetModel, list[Document]]:
    """The embedded model in float32, and some prompts with what it says after them."""
    path = outpace.nano_path()
    target = outpace.Target(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(text).input_ids for text in PROMPTS[:_TEXTS]]
    found = Engine(target).generate(prompts, SamplingParams(max_new_tokens=48))
    return target, [Document((*p, *g.tokens), len(p)) for p, g in zip(prompts, found, strict=True)]
