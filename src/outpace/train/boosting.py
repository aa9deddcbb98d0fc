"""Boosting: a drafter that learns what drafters before it get wrong, to draft beside them.

Miao et al. 2023, SpecInfer, arXiv 2305.09781, collective boost-tuning. There whole samples that a draft model
already continues as the target does are left out of the next one's training; here single places are, those
whose token an earlier drafter puts first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.drafters import LEARNED
from outpace.learned.learned import CONFIG, Batch, Learned
from outpace.targets.base import TargetModel


def load_earlier(folder: str | Path, target: TargetModel) -> Learned:
    """The trained drafter in a folder, of whatever method.

    Raises:
        OutpaceError: there is none, or it does not fit the target.
    """
    file = Path(folder) / CONFIG
    try:
        described: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutpaceError(f"{folder} is no folder of a trained drafter: {error}") from error
    # A draft model's folder is transformers' own, and names no method.
    method = described.get("method", "draft_model") if isinstance(described, dict) else None
    if method not in LEARNED:
        raise OutpaceError(f"{file} is of no method known here; there are: {', '.join(LEARNED)}")
    return LEARNED[method].load(folder, target)


def all_layers(modules: Seq[Learned]) -> tuple[int, ...]:
    """Layers of the target that some modules read together."""
    return tuple(sorted({layer for module in modules for layer in module.hidden_layers}))


def still_wrong(batch: Batch, earlier: Seq[Learned]) -> Batch:
    """The batch, a place counted only if none of the earlier drafters puts its token first."""
    right = torch.zeros_like(batch.counted)
    right[:, 1:] = accepted_together(batch, earlier)[:, :-1] > 0
    return replace(batch, counted=batch.counted & ~right)


@torch.no_grad()
def accepted_together(batch: Batch, modules: Seq[Learned]) -> Tensor:
    """[B, T]: how many tokens stand where the drafts of some modules are merged into one tree: the most."""
    return torch.stack([module.accepted(batch) for module in modules]).amax(dim=0)


def fingerprint(module: Learned) -> str:
    """SHA-256 of a module's weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()
