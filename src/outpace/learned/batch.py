"""Batches that learned drafters learn from: packed text, and the target's predictions for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Packed text, and the target's predictions at each place of it: B rows of T places.

    Attributes:
        tokens: [B, T].
        positions: [B, T], within the place's own document.
        documents: [B, T], the index of the place's document in its row; -1 is padding. Nothing looks across.
        counted: [B, T], true if the token is to be learnt: the target's own text, not a prompt's.
        hidden: layer -> [B, T, hidden size], for the layers that the module reads.
        logits: [B, T, vocabulary], the target's own: ``logits[:, t]`` predicts ``tokens[:, t + 1]``.
        sampled: whether the text after the prompts is the drafter's own (on-policy), not the target's.

    Hidden states and logits have no graph; a method that trains the target too runs it itself.
    """

    tokens: Tensor
    positions: Tensor
    documents: Tensor
    counted: Tensor
    hidden: Mapping[int, Tensor]
    logits: Tensor
    sampled: bool = False

    @property
    def labels(self) -> Tensor:
        """[B, T]: the token to be learnt after each place: the text's next one, or the target's most probable
        one if the text is the drafter's own. (The last place's has no meaning.)
        """
        return self.logits.argmax(dim=-1) if self.sampled else self.tokens.roll(-1, dims=1)

    @property
    def seen(self) -> Tensor:
        """[B, T, T]: true if a place (second axis) sees another (third): of its document, up to itself."""
        order = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (self.documents[:, :, None] == self.documents[:, None]) & (order[:, None] >= order)

    def ahead(self, distance: int) -> Tensor:
        """[B, T]: true if the place ``distance`` ahead is of the same document, and its token counted."""
        found = torch.zeros_like(self.counted)
        if distance < self.tokens.shape[1]:
            stop = self.tokens.shape[1] - distance
            found[:, :stop] = (
                self.counted[:, distance:] & (self.documents[:, distance:] == self.documents[:, :stop])
            ) & (self.documents[:, :stop] >= 0)
        return found
