"""Modules that continue the target's states, as they learn: unrolled along a text, depth by depth.

Row s, from 0 to T - 2, reads the target's state of place s and drafts for the root at place s + 1. At depth
j, at position s + j, it reads token s + 1 + j and its own output of depth j - 1, and its output predicts
token s + 2 + j.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.learned.layers import Store
from outpace.learned.learned import PartialHead
from outpace_lab.train.trained import (
    Losses,
    Objective,
    Trained,
    TrainingBatch,
    accepted_of_chain,
    among,
    logits_among,
    measure,
)

Stores = Callable[[int], Store]


class Unrolled(Trained):
    """A module that learns all depths of a chain at once. Its config has ``tokens``, the chain's length."""

    config: Any

    @property
    @abstractmethod
    def ids(self) -> Tensor | None:
        """The target's id of each drafted id, ascending; None if all ids are drafted."""

    @property
    @abstractmethod
    def targets_head(self) -> PartialHead:
        """The target's head over the drafted ids."""

    @abstractmethod
    def drafted_logits(self, states: Tensor) -> Tensor:
        """Logits [..., drafted ids] of the token after rows whose outputs are [..., hidden size]."""

    @abstractmethod
    def unroll(self, batch: TrainingBatch, steps: int) -> Iterator[Tensor]:
        """Outputs [B, T - 1, hidden size] of the rows at each depth, from 0 on."""

    def measured(
        self, batch: TrainingBatch, objective: Objective, outputs: Seq[Tensor], weights: Seq[float]
    ) -> Losses:
        """The objective over the outputs of all depths."""
        every = torch.stack([batch.ahead(depth + 2).sum() for depth in range(len(outputs))])
        return among(measure(objective, self._depths(batch, outputs), weights), every)

    def _depths(self, batch: TrainingBatch, outputs: Seq[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield, per depth, the draft's logits, the target's logits and the text's tokens, over drafted ids.

        Row s at depth j predicts the token of place s + ahead, ahead = j + 2, as the target does at place
        s + ahead - 1.
        """
        width, ids = batch.tokens.shape[1], self.ids
        numbers = None  # of the drafted ids; -1 for other tokens
        if ids is not None:
            numbers = torch.full((self.fit.vocabulary,), -1, device=ids.device)
            numbers[ids] = torch.arange(len(ids), device=ids.device)
        for depth, states in enumerate(outputs):
            ahead = depth + 2
            labels = batch.tokens.roll(-ahead, dims=1)[:, : width - 1]
            labels = labels if numbers is None else numbers[labels]
            where = batch.ahead(ahead)[:, :-1] & (labels >= 0)
            source = F.pad(where, (ahead - 1, 2 - ahead))
            yield (
                self.drafted_logits(states[where]),
                logits_among(self.targets_head, batch, source),
                labels[where],
            )

    @torch.no_grad()
    def accepted(self, batch: TrainingBatch) -> Tensor:
        """Number of accepted tokens of a chain of ``config.tokens`` tokens, at each place.

        It is 0 where the next token is not counted.
        """
        begins = batch.documents[:, 1:] != batch.documents[:, :-1]
        where, ids = batch.ahead(2)[:, :-1] & ~begins, self.ids
        guesses = torch.full((*batch.tokens.shape, self.config.tokens), -1, device=batch.tokens.device)
        for depth, states in enumerate(self.unroll(batch, self.config.tokens)):
            # The row that reads the feature of place s drafts for the root at place s + 1.
            best = self.drafted_logits(states[where]).argmax(dim=-1)
            guesses[:, 1:, depth][where] = best if ids is None else ids[best]
        return accepted_of_chain(batch, guesses)


def unroll(
    batch: TrainingBatch,
    features: Tensor,
    steps: int,
    layers: int,
    advance: Callable[[Tensor, Tensor, Tensor, Tensor, Stores], Tensor],
) -> Iterator[Tensor]:
    """Training-time test (EAGLE-3, section 3.2) of a module that drafts on from its own output.

    As in decoding a row attends to the rows that read the target's features of places 0 to s, columns 0 to
    T - 2 of the mask, and to its own rows of depths 1 to j, column s of each further block of columns. Beyond
    depth 0 only rows that draft a learnt token at some depth are computed; the outputs of others are zeros.

    Args:
        features: what the rows read at depth 0, [B, T - 1, hidden size].
        layers: number of the module's layers.
        advance: outputs of rows from their tokens, what they read, their positions, a mask and the layers'
            stores.
    """
    width = batch.tokens.shape[1] - 1
    learnt = torch.stack([batch.ahead(depth + 2) for depth in range(steps)]).any(dim=0)[:, :-1]
    # The learnt rows of each text come first; texts with fewer of them than the longest are padded with
    # rows that are not learnt.
    most = max(1, int(learnt.sum(dim=1).max()))
    rows = learnt.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    stores = keeping(layers)
    seen, positions = batch.seen[:, None, :-1, :-1], batch.positions[:, :-1]
    whole = advance(batch.tokens[:, 1:], features, positions, seen, stores)
    yield whole
    tokens = F.pad(batch.tokens, (0, steps))
    places = rows[..., None].expand(-1, -1, whole.shape[-1])
    base = seen.gather(2, rows[:, None, :, None].expand(-1, 1, -1, width))
    itself = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device)
    itself = itself.expand(len(rows), 1, -1, -1)
    states = whole.gather(1, places)
    for depth in range(1, steps):
        mask = torch.cat([base] + [itself] * depth, dim=-1)
        read = tokens.gather(1, rows + 1 + depth)
        states = advance(read, states, positions.gather(1, rows) + depth, mask, stores)
        yield torch.zeros_like(whole, dtype=states.dtype).scatter(1, places, states)


def keeping(layers: int) -> Stores:
    """Stores of some layers that keep all keys and values they are given, in their order."""
    kept: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in range(layers)}

    def stores(layer: int) -> Store:
        def store(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            kept[layer].append((keys, values))
            every = list(zip(*kept[layer], strict=True))
            return torch.cat(every[0], dim=2), torch.cat(every[1], dim=2)

        return store

    return stores
