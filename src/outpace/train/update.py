"""An update of the weights by some batches: in all processes as if they were one batch."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.learned.learned import Batch, Losses, Objective

_BY_DEPTH = ("loss", "acceptance")  # of ``Losses``


def update(
    prepared: Any,
    optimizer: Any,
    accelerator: Any,
    batches: Iterable[Batch],
    objective: Objective,
    clip: float,
    bf16: bool,
) -> list[Losses]:
    """An update of the weights by some batches, and by those of the other processes.

    All places count alike, in whichever batch they are. So the gradients of a draft of one depth are those of
    one large batch; of a draft of several nearly so, as its last ones have fewer places.

    Args:
        prepared: the module, by accelerate; so the optimizer.
        batches: as many as the accelerator gathers gradients of.
        clip: the greatest norm of the gradients.
        bf16: forwards in bfloat16.
    """
    parts: list[Losses] = []
    for batch in batches:
        with accelerator.accumulate(prepared):
            # Accelerate's own mixed precision cannot be changed in a process that has trained before.
            with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=bf16):
                losses: Losses = prepared(batch, objective)
            accelerator.backward(losses.total * losses.places.sum())
            parts.append(replace(losses, total=losses.total.detach()))
            if accelerator.sync_gradients:
                places = accelerator.reduce(torch.stack([part.places for part in parts]).sum(), "sum")
                # What accelerate has divided by already.
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
    """The means of an update's forwards, in all processes, places counted alike."""
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
