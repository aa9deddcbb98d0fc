"""Learned drafters for the embedded model, trained briefly on its own text.

    PYTHONPATH=tests:lab/tests python lab/tests/taught.py tests/trained

writes the drafters that outpace's own tests read, in bfloat16.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from learning import train
from lossless.prompts import PROMPTS
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.learned.folder import CONFIG, read_weights, write_folder
from outpace.targets import TargetModel
from outpace_lab.train.data import Document
from outpace_lab.train.joint import Joint
from outpace_lab.train.lora import LoRA
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.modules.heads import TrainedMedusa
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import Trained

# Few texts, so that a few seconds teach a drafter enough of them for its drafts to be accepted.
_TEXTS = 3
_STEPS = 40
_FEWER = 8
# Heads that knew their texts by heart would find that a chain is their best tree.
_STEPS_OF = {"hydra": 12}
# Those of outpace's own drafters keep their folders small.
_OPTIONS: dict[str, dict[str, Any]] = {
    "dflash": {"tokens": 3, "layers": (2, -1), "depth": 1, "kv_heads": 1, "intermediate_size": 128},
    "early_exit attention": {"adapter": "attention"},
    "hydra": {"heads": 2, "layers": 1},
    "parallel_tokens": {"num_speculative_tokens": 2},
    "spec_drafter": {"tokens": 3},
}


def with_trained(spec: str) -> str:
    """The spec, ``{trained}`` in it replaced by the folder of such a drafter; ``{trained attention}`` by that
    of one with these options.
    """
    method = spec.partition(":")[0]
    return re.sub(r"{trained( \w+)?}", lambda found: str(trained(method + (found[1] or ""))), spec)


@lru_cache
def trained(name: str) -> Path:
    """The folder of a method's drafter: enough for some drafts to be accepted, and no more.

    Args:
        name: the method, or its entry in the options.
    """

    def make() -> Trained:
        target, texts = _material()
        cls = LEARNED[name.partition(" ")[0]]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = cls.new(cls.config_type(**_OPTIONS.get(name, {})), target)
        batch = read_batch(target, [texts], module.hidden_layers)
        train(module, batch, _STEPS_OF.get(name, _STEPS), 3e-3)
        return module

    return _saved(name, make)


def ship(folder: Path) -> None:
    """Write the drafters of outpace's own tests to a folder, in bfloat16."""
    for method in ("dflash", "hydra"):
        made = trained(method)
        tensors = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in read_weights(made).items()
        }
        write_folder(folder / method, json.loads((made / CONFIG).read_text("utf-8")), tensors)


def _saved(name: str, make: Callable[[], Trained]) -> Path:
    """The folder of a drafter that is trained once for all processes of a run of the tests."""
    folder = Path(os.environ["OUTPACE_TRAINED"]) / name
    if not folder.exists():
        own = folder.with_name(f"{name} by {os.getpid()}")
        make().save(own)
        try:
            own.rename(folder)
        except OSError:  # another process was first
            rmtree(own)
    return folder


@lru_cache
def tuned() -> Path:
    """The folder of heads whose target was trained too (Medusa-2), with its updates in ``target``.

    They begin as the embedded ones, so that tokens of all parts of their trees stand.
    """

    def make() -> Joint:
        _, texts = _material()
        target = _target()
        heads = TrainedMedusa.load(outpace.nano_drafter_path("medusa"), target).requires_grad_(True)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            # With weight 0 nothing keeps the target near its old outputs, so its text changes.
            module = Joint(heads, LoRA(rank=4, weight=0.0, warmup=0.0))
        module.at_step(0, _FEWER)
        train(module.train(), read_batch(target, [texts], ()), _FEWER, 1e-3)
        return module

    return _saved("tuned", make)


@lru_cache
def _material() -> tuple[TargetModel, list[Document]]:
    """The embedded model in float32, and some prompts with its output."""
    target = _target()
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    prompts = [tokenizer(text).input_ids for text in PROMPTS[:_TEXTS]]
    found = Engine(target).generate(prompts, SamplingParams(max_new_tokens=48))
    return target, [Document((*p, *g.tokens), len(p)) for p, g in zip(prompts, found, strict=True)]


def _target() -> TargetModel:
    return outpace.Target(AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=torch.float32))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        os.environ["OUTPACE_TRAINED"] = work
        ship(Path(sys.argv[1]))
