"""Drafters of blocks as they learn: blocks after places of a text, drawn at random.

See ``outpace.drafters.blocks``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import ClassVar, cast

import torch
from torch import Tensor

from outpace.drafters.blocks.dflash_module import DFlashModule
from outpace.drafters.support.blocks import BlockModule
from outpace.learned.layers import Attention, Store
from outpace_lab.train.trained import (
    Losses,
    Objective,
    TrainedPart,
    TrainingBatch,
    accepted_of_chain,
    among,
    ids_of,
    learnt_logits,
    measure,
    number,
)


class TrainedBlocks(BlockModule, TrainedPart):
    """A module that fills blocks, in training."""

    @abstractmethod
    def blocks(self, batch: TrainingBatch, anchors: Tensor) -> Tensor:
        """Outputs [B, A, tokens, hidden size] for the places after each anchor.

        Args:
            anchors: places of the batch, each the root of a draft, [B, A].
        """

    def loss(self, batch: TrainingBatch, objective: Objective) -> Losses:
        config = self.config
        anchors = draw_places(batch, config.anchors, range(1, config.tokens + 1))
        states = self.blocks(batch, anchors)
        distances = torch.arange(config.tokens, dtype=torch.float64)
        weights: list[float] = torch.exp(-distances / config.decay).tolist()
        every = torch.stack(
            [batch.ahead(place + 1).gather(1, anchors).sum() for place in range(config.tokens)]
        )
        return among(measure(objective, self._depths(batch, anchors, states), weights), every)

    def _depths(
        self, batch: TrainingBatch, anchors: Tensor, states: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        rows = torch.arange(len(anchors), device=anchors.device)[:, None].expand_as(anchors)
        for place in range(self.config.tokens):
            labels = number(self.drafted, batch.tokens.roll(-place - 1, dims=1).gather(1, anchors))
            where = batch.ahead(place + 1).gather(1, anchors) & (labels >= 0)
            yield (
                self.logits(states[:, :, place][where]),
                learnt_logits(self, batch, rows[where], anchors[where] + place),
                labels[where],
            )

    @torch.no_grad()
    def accepted(self, batch: TrainingBatch) -> Tensor:
        """Number of accepted tokens of a chain of a full block, at each place of the text."""
        every = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        guesses = [
            ids_of(self.drafted, self.logits(self.blocks(batch, anchors)).argmax(dim=-1))
            for anchors in every.split(self.config.anchors, dim=1)
        ]
        return accepted_of_chain(batch, torch.cat(guesses, dim=1))


class TrainedDFlash(DFlashModule, TrainedBlocks):
    """DFlash's layers, in training."""

    extends: ClassVar[bool] = False

    def blocks(self, batch: TrainingBatch, anchors: Tensor) -> Tensor:
        count, width = anchors.shape[1], 1 + self.config.tokens
        text = self.fuse(self.joined(batch.hidden))
        text_angles = self.rotary(batch.positions, text)
        steps = torch.arange(width, device=anchors.device)
        positions = (batch.positions.gather(1, anchors)[..., None] + steps).flatten(1)
        own = sees_own_block(count, width, anchors.device).expand(len(anchors), -1, -1)
        mask = torch.cat([sees_before(batch, anchors, width, own=False), own], dim=-1)[:, None]
        states = self.masked(batch.tokens.gather(1, anchors)).flatten(1, 2)
        angles = self.rotary(positions, states)
        for layer in self.layers:
            attention = cast(Attention, layer.self_attn)
            states = layer(states, angles, mask, _behind(*attention.keys(text, text_angles)))
        filled: Tensor = states.unflatten(1, (count, width))[:, :, 1:]
        return filled


def _behind(keys: Tensor, values: Tensor) -> Store:
    """A store for rows that attend to a text's keys and values and to each other."""
    return lambda own, theirs: (torch.cat([keys, own], dim=2), torch.cat([values, theirs], dim=2))


def draw_places(batch: TrainingBatch, count: int, distances: Seq[int]) -> Tensor:
    """Distinct random places [B, A]; those with a counted token at one of the distances are preferred."""
    useful = torch.stack([batch.ahead(distance) for distance in distances]).any(dim=0)
    order = torch.rand(useful.shape).to(useful.device) + useful
    return order.topk(min(count, useful.shape[1]), dim=1).indices


def sees_own_block(anchors: int, width: int, device: torch.device) -> Tensor:
    """Mask [A x width, A x width], true where two rows belong to the same block."""
    block = torch.arange(anchors * width, device=device) // width
    return block[:, None] == block


def sees_before(batch: TrainingBatch, anchors: Tensor, width: int, own: bool) -> Tensor:
    """Mask [B, A x width, T], true where a row of an anchor's block attends to a place of the text.

    Args:
        own: whether rows attend to the anchor's place too.
    """
    places = torch.arange(batch.tokens.shape[1], device=anchors.device)
    ends = anchors[..., None] + int(own)
    same = batch.documents.gather(1, anchors)[..., None] == batch.documents[:, None]
    return ((places < ends) & same).repeat_interleave(width, dim=1)
