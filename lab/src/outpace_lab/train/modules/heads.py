"""Heads as they learn, and the accuracies of their guesses: Medusa's and Hydra's.

See ``outpace.drafters.heads``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.drafters.heads.heads import Heads
from outpace.drafters.heads.hydra import HydraConfig, HydraHeads
from outpace.drafters.heads.medusa import MedusaConfig, MedusaHeads
from outpace.learned.learned import head_weights
from outpace.targets.base import TargetModel
from outpace.tree import children
from outpace_lab.train.trained import (
    Losses,
    Objective,
    TrainedPart,
    TrainingBatch,
    among,
    learnt_logits,
    measure,
    number,
)


class TrainedHeads(Heads, TrainedPart):
    """Heads of any kind, in training."""

    @property
    def decay(self) -> float:
        """The weight of each depth in the loss, relative to the one before."""
        return float(self.config.decay)

    def loss(self, batch: TrainingBatch, objective: Objective) -> Losses:
        weights = [self.decay**depth for depth in range(self.depth)]
        depths = (
            (draft, learnt_logits(self, batch, at, places + 1 + depth), labels)
            for depth, (draft, labels, at, places) in enumerate(self._drafts(batch))
        )
        return among(measure(objective, depths, weights), self._counts(batch))

    def _counts(self, batch: TrainingBatch) -> Tensor:
        """Number of counted places per depth, whether or not their token can be drafted."""
        return torch.stack([batch.ahead(depth + 2).sum() for depth in range(self.depth)])

    def _drafts(self, batch: TrainingBatch) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield, per depth, the head's logits and the text's tokens, both by drafted ids, row and place.

        With the state of place t: the root at t + 1, the tokens drafted before this head's at t + 2 to
        t + 1 + depth, the label at t + 2 + depth. Only places whose label can be drafted.
        """
        for depth in range(self.depth):
            at, places = batch.ahead(depth + 2).nonzero(as_tuple=True)
            labels = number(self.drafted, batch.tokens[at, places + 2 + depth])
            at, places, labels = (found[labels >= 0] for found in (at, places, labels))
            paths = torch.stack([batch.tokens[at, places + 1 + step] for step in range(depth + 1)], dim=1)
            owners = torch.arange(len(at), device=at.device)
            yield self.rows(batch.hidden[-1][at, places], owners, paths), labels, at, places

    def _ranks(self, batch: TrainingBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield, per depth, the rank of the text's token, and the row and place of the draft's root.

        Places whose token cannot be drafted are left out.
        """
        for draft, labels, at, places in self._drafts(batch):
            rank = (draft > draft.gather(1, labels[:, None])).sum(dim=1)
            yield rank, at, places + 1

    @torch.no_grad()
    def accepted(self, batch: TrainingBatch) -> Tensor:
        below = children(self.tree())
        width = self.accuracies.shape[1]
        # table[node, rank] is the child of that rank, or `gone` if there is none. The root is the last node.
        gone = len(below)
        table = torch.full((gone + 1, width + 1), gone)
        for above, kids in enumerate(below):
            table[above, : len(kids)] = torch.tensor(kids, dtype=torch.long)
        table = table.to(batch.tokens.device)
        node = torch.full_like(batch.tokens, gone - 1)
        found = torch.zeros_like(batch.tokens)
        for rank, at, places in self._ranks(batch):
            reached = torch.full_like(node, gone)
            reached[at, places] = table[node[at, places], rank.clamp(max=width)]
            found += reached < gone
            node = reached
        return found

    @property
    def needs_calibration(self) -> bool:
        return True

    @torch.no_grad()
    def calibrate(self, batches: Iterable[TrainingBatch]) -> None:
        counts = torch.zeros(self.accuracies.shape, dtype=torch.float64)
        totals = torch.zeros(self.depth, 1, dtype=torch.float64)
        width = counts.shape[1]
        for batch in batches:
            for depth, (rank, _, _) in enumerate(self._ranks(batch)):
                counts[depth] += torch.bincount(rank.clamp(max=width), minlength=width + 1)[:width].cpu()
            totals += self._counts(batch)[:, None].cpu()
        if not bool((totals > 0).all()):
            raise OutpaceError(
                f"{self.method}: there is no text to measure the heads on that is longer than a draft; give "
                "more or longer texts, or fewer heads"
            )
        self.accuracies.copy_(counts / totals)


class TrainedMedusa(MedusaHeads, TrainedHeads):
    """Medusa's heads, in training."""

    @classmethod
    def new(cls, config: MedusaConfig, target: TargetModel) -> Self:
        made = super().new(config, target)
        _begin_with_the_head(made.projections, target)
        return made


class TrainedHydra(HydraHeads, TrainedHeads):
    """Hydra's heads, in training."""

    @classmethod
    def new(cls, config: HydraConfig, target: TargetModel) -> Self:
        made = super().new(config, target)
        _begin_with_the_head(made.projections, target)
        return made


@torch.no_grad()
def _begin_with_the_head(projections: nn.ModuleList, target: TargetModel) -> None:
    """Initialise heads' own projections, if there are any, from the target's head, if that is a matrix."""
    found = head_weights(target) if len(projections) else None
    if found is None:
        return
    for projection in projections:
        own = cast(nn.Linear, projection)
        own.weight.copy_(found[0])
        if own.bias is not None:
            own.bias.copy_(found[1])
