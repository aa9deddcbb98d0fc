"""What learned drafters learn from: packed text, and what the target says to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Packed text, and what the target says at each place of it: B rows of T places.

    Attributes:
        tokens: [B, T].
        positions: [B, T], in the place's own document.
        documents: [B, T], which of the row's documents a place is of; -1 is padding. Nothing looks across.
        counted: [B, T], whether the token is to be learnt: the target's own words, not a prompt's.
        hidden: layer -> [B, T, hidden size], for the layers that the module reads.
        logits: [B, T, vocabulary], the target's own: ``logits[:, t]`` is of ``tokens[:, t + 1]``.
        sampled: the text after the prompts is the drafter's own (on-policy), not the target's.

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
        """[B, T]: what is to be learnt after each place: the text's next token, or the one that the target
        would most probably go on with where the text is the drafter's own. (After the last place: nothing.)
        """
        return self.logits.argmax(dim=-1) if self.sampled else self.tokens.roll(-1, dims=1)

    @property
    def seen(self) -> Tensor:
        """[B, T, T]: whether a place (second axis) sees another: its document's, up to itself."""
        order = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (self.documents[:, :, None] == self.documents[:, None]) & (order[:, None] >= order)

    def ahead(self, distance: int) -> Tensor:
        """[B, T]: whether the place so far ahead is of the same document, and its token counted."""
        found = torch.zeros_like(self.counted)
        if distance < self.tokens.shape[1]:
            stop = self.tokens.shape[1] - distance
            found[:, :stop] = (
                self.counted[:, distance:] & (self.documents[:, distance:] == self.documents[:, :stop])
            ) & (self.documents[:, :stop] >= 0)
        return found
