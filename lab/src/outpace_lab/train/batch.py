"""Training batches of learned drafters: packed text and the target's predictions for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def padded(sources: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Tokens of sources, [B, S], with -1 after shorter ones."""
    each = [torch.tensor(source, dtype=torch.long) for source in sources]
    return pad_sequence(each, batch_first=True, padding_value=-1).to(device)


@dataclass(frozen=True)
class TrainingBatch:
    """Packed text and the target's predictions at each of its places: B rows of T places.

    Attributes:
        tokens: [B, T].
        positions: positions within the place's document, [B, T].
        documents: index of the place's document in its row, [B, T]; -1 is padding. There is no attention
            between documents.
        counted: [B, T], true if the token is to be learnt: the target's own text, not a prompt's.
        hidden: layer -> [B, T, hidden size], for the layers that the module reads.
        scores: the target's logits, [B, T, vocabulary], or a function that computes them.
        source: tokens of what an encoder-decoder model decodes each row from, as ``padded`` makes it; None
            without any.
        sampled: whether the text after the prompts is the drafter's own (on-policy), not the target's.

    Hidden states and logits have no autograd graph; a method that also trains the target runs it itself.
    """

    tokens: Tensor
    positions: Tensor
    documents: Tensor
    counted: Tensor
    hidden: Mapping[int, Tensor]
    scores: Tensor | Callable[[], Tensor]
    sampled: bool = False
    source: Tensor | None = None

    @cached_property
    def logits(self) -> Tensor:
        """The target's logits, [B, T, vocabulary]: ``logits[:, t]`` predicts ``tokens[:, t + 1]``."""
        return self.scores if isinstance(self.scores, Tensor) else self.scores()

    @property
    def labels(self) -> Tensor:
        """The token to learn after each place, [B, T]; undefined at the last place.

        It is the text's next token, or the target's most probable one if the text is the drafter's own.
        """
        return self.logits.argmax(dim=-1) if self.sampled else self.tokens.roll(-1, dims=1)

    @property
    def seen(self) -> Tensor:
        """Causal mask within documents, [B, T, T]: true if a place (axis 1) attends to another (axis 2)."""
        order = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (self.documents[:, :, None] == self.documents[:, None]) & (order[:, None] >= order)

    def ahead(self, distance: int) -> Tensor:
        """Mask [B, T], true if the place ``distance`` ahead is in the same document and its token counted."""
        found = torch.zeros_like(self.counted)
        if distance < self.tokens.shape[1]:
            stop = self.tokens.shape[1] - distance
            found[:, :stop] = (
                self.counted[:, distance:] & (self.documents[:, distance:] == self.documents[:, :stop])
            ) & (self.documents[:, :stop] >= 0)
        return found
