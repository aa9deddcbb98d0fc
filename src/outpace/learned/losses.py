"""How far a draft is from the text: what it has yet to learn of it, and how much of it would stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.learned.batch import Batch

# (draft logits [N, vocabulary], target logits [N, vocabulary], labels [N]) -> the loss of each, [N].
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Losses:
    """What a batch says about a module, D depths of its draft.

    Attributes:
        total: the scalar to minimise.
        loss: [D], the mean of the objective at each depth.
        acceptance: [D], the share of places where the draft's most probable token is the text's.
        places: [D], how many places those are the means of.
    """

    total: Tensor
    loss: Tensor
    acceptance: Tensor
    places: Tensor


def measure(
    objective: Objective, depths: Iterable[tuple[Tensor, Tensor, Tensor]], weights: Seq[float]
) -> Losses:
    """The losses of a draft whose depths are learnt alike.

    Args:
        depths: at each depth the draft's logits [N, vocabulary], the target's of the same places, and the
            text's tokens [N]; N may be 0.
        weights: of each depth in the total.
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


def accepted_of_chain(batch: Batch, guesses: Tensor) -> Tensor:
    """How many tokens of a chain stand, drafted at each place of a text.

    Args:
        guesses: [B, T, D], at place t the tokens guessed for t + 1, t + 2, ...

    Returns:
        [B, T], from 0 to D.
    """
    return accepted_at(batch, guesses[..., None])


def accepted_at(batch: Batch, guesses: Tensor) -> Tensor:
    """How many depths stand in a row, where R tokens are guessed for each: [B, T, D, R] -> [B, T]."""
    right = torch.zeros_like(guesses[..., 0], dtype=torch.bool)
    width = batch.tokens.shape[1]
    for depth in range(min(guesses.shape[2], width - 1)):
        stop = width - depth - 1
        same = batch.documents[:, depth + 1 :] == batch.documents[:, :stop]
        equal = (guesses[:, :stop, depth] == batch.tokens[:, depth + 1 :, None]).any(dim=-1)
        right[:, :stop, depth] = equal & same
    return right.cumprod(dim=-1).sum(dim=-1)
