"""An update of the weights by several batches, in all processes, as if they were one batch."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace_lab.train.trained import Losses, Objective, TrainingBatch

_BY_DEPTH = ("loss", "acceptance")  # of ``Losses``


def update(
    prepared: Any,
    optimizer: Any,
    accelerator: Any,
    batches: Iterable[TrainingBatch],
    objective: Objective,
    clip: float,
    bf16: bool,
) -> list[Losses]:
    """Update the weights by these batches and those of the other processes; return the losses per batch.

    All places have the same weight, in whichever batch they are. So for a draft of one depth the gradients
    equal those of one large batch; for several depths nearly so, because the last ones have fewer places.

    Args:
        prepared, optimizer: the module and its optimizer, prepared by accelerate.
        batches: as many as the accelerator accumulates gradients of.
        clip: the maximum norm of the gradients.
        bf16: run the forwards in bfloat16.
    """
    parts: list[Losses] = []
    for batch in batches:
        with accelerator.accumulate(prepared):
            # Accelerate's own mixed precision cannot be changed once a process has trained.
            with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=bf16):
                losses: Losses = prepared(batch, objective)
            accelerator.backward(losses.total * losses.places.sum())
            parts.append(replace(losses, total=losses.total.detach()))
            if accelerator.sync_gradients:
                places = accelerator.reduce(torch.stack([part.places for part in parts]).sum(), "sum")
                # Undo accelerate's division by batches and processes, and divide by the places instead.
                _scale(prepared, len(parts) * accelerator.num_processes / places.clamp(min=1))
                accelerator.clip_grad_norm_(prepared.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return parts


def _scale(module: Any, factor: Tensor) -> None:
    for weight in module.parameters():
        if weight.grad is not None:
            weight.grad.mul_(factor)


def means(parts: Seq[Losses], accelerator: Any) -> dict[str, Any]:
    """The means over an update's forwards in all processes, every place having the same weight."""
    places = torch.stack([part.places for part in parts])
    sums = [
        (torch.stack([part.total for part in parts]) * places.sum(dim=1)).sum()[None],
        *((torch.stack([getattr(part, name) for part in parts]) * places).sum(dim=0) for name in _BY_DEPTH),
        places.sum(dim=0),
    ]
    found = accelerator.reduce(torch.cat([part.float() for part in sums]), "sum")
    loss, first, second, counts = found.split([len(part) for part in sums])
    return {
        "loss": float(loss / counts.sum().clamp(min=1)),
        "loss_by_depth": (first / counts.clamp(min=1)).tolist(),
        "acceptance_by_depth": (second / counts.clamp(min=1)).tolist(),
    }
