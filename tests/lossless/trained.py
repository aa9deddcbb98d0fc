"""Folders of learned drafters for the embedded model, trained for a moment on its own words."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from learning import batch_of, train
from lossless.prompts import PROMPTS
from outpace.core import SamplingParams
from outpace.drafters import LEARNED
from outpace.engine import Engine
from outpace.targets import TargetModel

_FOLDER = tempfile.TemporaryDirectory(prefix="outpace-")  # goes when the tests end
_TEXTS = 4
_STEPS = 12


@lru_cache
def _target() -> tuple[TargetModel, list[list[int]]]:
    """The embedded model in float32, and some prompts with what it says after them."""
    path = outpace.nano_path()
    target = outpace.Target(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(text).input_ids for text in PROMPTS[:_TEXTS]]
    found = Engine(target).generate(prompts, SamplingParams(max_new_tokens=48))
    return target, [prompt + one.tokens for prompt, one in zip(prompts, found, strict=True)]


@lru_cache
def trained_folder(method: str) -> Path:
    """A folder that the drafter of this name loads: enough for some drafts to be accepted, and no more."""
    target, texts = _target()
    cls = LEARNED[method]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = cls.new(cls.config_type(), target)
    train(module, batch_of(target, texts, module.hidden_layers), _STEPS, rate=2e-3)
    folder = Path(_FOLDER.name) / method
    module.save(folder)
    return folder
