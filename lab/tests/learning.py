"""For tests of learning: a little training, and a tokenizer for texts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import modeling_layers

from mtp_folders import write_beside
from outpace.targets import TargetModel
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.objectives import ground_truth
from outpace_lab.train.trained import Losses, Trained, TrainingBatch

# Prediction layers need transformers 5.24.
METHODS = [name for name in LEARNED if name != "mtp" or hasattr(modeling_layers, "MtpModel")]


def new(method: str, target: TargetModel, **options: Any) -> Trained:
    """A module to train. Prediction layers begin with one that is written for the target, which has none."""
    cls = LEARNED[method]
    if method == "mtp":
        options.setdefault("path", _layer(target))
    return cls.new(cls.config_type(**options), target)


@lru_cache
def _layer(target: TargetModel) -> str:
    texts = [[(7 * place + row) % target.vocabulary for place in range(20)] for row in range(4)]
    return str(write_beside(Path(tempfile.mkdtemp()), target.model, texts))


def train(module: Trained, batch: TrainingBatch, steps: int, rate: float = 5e-3) -> list[Losses]:
    """The losses of some steps on one batch; the module is ready to draft afterwards."""
    seen = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(module.parameters(), rate)
        for _ in range(steps):
            losses = module.loss(batch, ground_truth)
            optimizer.zero_grad()
            losses.total.backward()
            optimizer.step()
            seen.append(replace(losses, total=losses.total.detach()))
    module.requires_grad_(False).eval()
    module.calibrate([batch])
    return seen


class Letters:
    """A tokenizer of letters; a chat is formatted as its roles and texts."""

    def tokens(self, text: str) -> list[int]:
        return [1, *self.plain_tokens(text)]

    def plain_tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.plain_tokens("".join(turn["role"][0] + turn["content"] for turn in messages) + "a")
