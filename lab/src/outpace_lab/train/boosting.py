"""Boosting: training a drafter on what earlier drafters get wrong, to draft beside them.

Miao et al. 2023, SpecInfer, arXiv 2305.09781, collective boost-tuning. The paper leaves out of the next draft
model's training whole samples that an earlier one already continues as the target does. Here single places
are left out: those whose token an earlier drafter ranks first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.files import read_json
from outpace.learned.learned import CONFIG
from outpace.targets.base import TargetModel
from outpace_lab.train.methods import LEARNED
from outpace_lab.train.trained import Trained, TrainingBatch


def load_earlier(folder: str | Path, target: TargetModel) -> Trained:
    """Load the trained drafter in a folder, of any method.

    Raises:
        OutpaceError: there is none, or it does not fit the target.
    """
    file = Path(folder) / CONFIG
    try:
        described: Any = read_json(file)
    except OutpaceError as error:
        raise OutpaceError(f"{folder} is not the folder of a trained drafter: {error}") from error
    # A draft model's folder is transformers' own, and names no method.
    method = described.get("method", "draft_model") if isinstance(described, dict) else None
    if method not in LEARNED:
        raise OutpaceError(f"{file} names an unknown method {method!r}; known are: {', '.join(LEARNED)}")
    return LEARNED[method].load(folder, target)


def all_layers(modules: Seq[Trained]) -> tuple[int, ...]:
    """The union of the target's layers that the modules read, ascending."""
    return tuple(sorted({layer for module in modules for layer in module.hidden_layers}))


def still_wrong(batch: TrainingBatch, earlier: Seq[Trained]) -> TrainingBatch:
    """The batch with a place counted only if no earlier drafter ranks its token first."""
    right = torch.zeros_like(batch.counted)
    right[:, 1:] = accepted_together(batch, earlier)[:, :-1] > 0
    return replace(batch, counted=batch.counted & ~right)


@torch.no_grad()
def accepted_together(batch: TrainingBatch, modules: Seq[Trained]) -> Tensor:
    """Tokens accepted at each place, [B, T], if the drafts are merged into one tree: the maximum."""
    return torch.stack([module.accepted(batch) for module in modules]).amax(dim=0)


def fingerprint(module: Trained) -> str:
    """SHA-256 of a module's weights, as hexadecimal digits."""
    total = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()
