"""Learned drafters for the embedded model, trained a little on the prompts."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from outpace.drafters import LEARNED
from outpace.targets.base import TargetModel
from outpace.train.data import Document, pack
from outpace.train.objectives import objective
from outpace.train.reading import read_batch

_STEPS = 30


@lru_cache
def trained(method: str, folder: Path, target: TargetModel, texts: tuple[tuple[int, ...], ...]) -> Path:
    """The folder of a method's drafter."""
    torch.manual_seed(0)
    cls = LEARNED[method]
    module = cls.new(cls.config_type(), target)
    rows = pack([Document(text) for text in texts], 256)[:8]
    batch = read_batch(target, rows, module.hidden_layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        module.loss(batch, objective("ground_truth")).total.backward()
        optimizer.step()
    module.calibrate([batch])
    module.save(folder / method)
    return folder / method
