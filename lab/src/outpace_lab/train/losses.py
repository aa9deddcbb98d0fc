"""Losses of a draft, and the number of its tokens that would be accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace_lab.train.batch import TrainingBatch

# (draft logits [N, vocabulary], target logits [N, vocabulary], labels [N]) -> the loss at each place, [N].
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Losses:
    """The losses of a module on a batch, at D depths of its draft.

    Attributes:
        total: the scalar to minimise.
        loss: mean of the objective at each depth, [D].
        acceptance: share of places where the draft's most probable token is the text's, [D].
        places: number of places in those means, [D].
    """

    total: Tensor
    loss: Tensor
    acceptance: Tensor
    places: Tensor


def measure(
    objective: Objective, depths: Iterable[tuple[Tensor, Tensor, Tensor]], weights: Seq[float]
) -> Losses:
    """The losses of a draft, with the same objective at all depths.

    Args:
        depths: per depth, the draft's logits [N, vocabulary], the target's at the same places, and the
            text's tokens [N]; N may be 0.
        weights: weight of each depth in the total.
    """
    loss, acceptance, places = [], [], []
    for draft, target, labels in depths:
        count = max(len(labels), 1)
        loss.append(objective(draft, target, labels).sum() / count)
        acceptance.append((draft.argmax(dim=-1) == labels).sum() / count)
        places.append(len(labels))
    stacked = torch.stack(loss)
    total = (stacked * torch.tensor(list(weights), dtype=stacked.dtype, device=stacked.device)).sum()
    counts = torch.tensor(places, device=stacked.device)
    return Losses(total, stacked.detach(), torch.stack(acceptance), counts)


def among(losses: Losses, every: Tensor) -> Losses:
    """Losses whose acceptance is the share among ``every`` place, [D], those with nothing to learn included.

    A token that cannot be drafted is one that is not accepted.
    """
    return replace(losses, acceptance=losses.acceptance * losses.places / every.clamp(min=1))


def accepted_of_chain(batch: TrainingBatch, guesses: Tensor) -> Tensor:
    """The number of accepted tokens, from the first on, of a chain drafted at each place of a text.

    Args:
        guesses: [B, T, D]: at place t, the tokens guessed for t + 1, t + 2, ...

    Returns:
        [B, T], from 0 to D.
    """
    right = torch.zeros_like(guesses, dtype=torch.bool)
    width = batch.tokens.shape[1]
    for depth in range(min(guesses.shape[2], width - 1)):
        stop = width - depth - 1
        same = batch.documents[:, depth + 1 :] == batch.documents[:, :stop]
        right[:, :stop, depth] = same & (guesses[:, :stop, depth] == batch.tokens[:, depth + 1 :])
    return right.cumprod(dim=-1).sum(dim=-1)
