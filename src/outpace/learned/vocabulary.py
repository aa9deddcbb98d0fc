"""The part of the target's vocabulary that a drafter drafts.

The head of a large vocabulary costs more than the layers of a small drafter, in training and in drafting, and
most of a text consists of few tokens (Zhao et al. 2025, FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.learned.learned import Batch, Fit, Learned, PartialHead
from outpace.targets.base import TargetModel


class DraftVocabulary(nn.Module):
    """The target's ids that are drafted, and its head over them.

    *Drafted ids* number them from 0. If all ids are drafted there are no weights.

    Args:
        size: number of ids drafted, until ``choose`` the first ones; 0 is all.

    Raises:
        OutpaceError: the target has fewer.
    """

    ids: Tensor

    def __init__(self, method: str, size: int, fit: Fit) -> None:
        super().__init__()
        if not 0 <= size <= fit.vocabulary:
            raise OutpaceError(
                f"{method}: draft_vocabulary must be at most the target's vocabulary, {fit.vocabulary}, not "
                f"{size}; 0 drafts all of it"
            )
        self.reduced = 0 < size < fit.vocabulary
        self._whole = fit.vocabulary
        self._head: PartialHead | None = None
        if self.reduced:
            self.register_buffer("ids", torch.arange(size))

    @property
    def part(self) -> Tensor | None:
        """The ids that are drafted; None if all are."""
        return self.ids if self.reduced else None

    def check(self, where: str) -> None:
        """Check ids that came from a file.

        Raises:
            OutpaceError: one is not the target's, or they do not ascend.
        """
        wrong = self.reduced and (
            self.ids[0] < 0 or self.ids[-1] >= self._whole or (self.ids.diff() <= 0).any()
        )
        if wrong:
            raise OutpaceError(
                f"{where}: tensor 'drafted.ids' must ascend, with ids below {self._whole}; train it again"
            )

    @torch.no_grad()
    def choose(self, counts: Tensor) -> None:
        """Draft the most frequent ids, of equally frequent ones the first."""
        if self.reduced:
            chosen = counts.argsort(descending=True, stable=True)[: len(self.ids)]
            self.ids.copy_(chosen.sort().values)
            self._head = None

    def head(self, target: TargetModel) -> PartialHead:
        """The target's head over the drafted ids."""
        if self._head is None:
            self._head = PartialHead(target, self.part)
        return self._head

    def number(self, tokens: Tensor) -> Tensor:
        """The drafted ids of the target's; -1 for those that are not drafted."""
        if not self.reduced:
            return tokens
        places = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[places] == tokens, places, -1)

    def learnable(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The places of a batch whose next token is to be learnt and can be drafted.

        Returns:
            Their rows, places and next tokens, the latter by drafted ids, each [n]; and the number of places,
            [1], with those whose token cannot be drafted.
        """
        at, places = batch.ahead(1).nonzero(as_tuple=True)
        labels = self.number(batch.labels[at, places])
        kept = labels >= 0
        return at[kept], places[kept], labels[kept], torch.tensor([len(at)], device=at.device)

    def tokens(self, numbers: Tensor) -> Tensor:
        """The target's ids of drafted ids."""
        return self.ids[numbers] if self.reduced else numbers

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the target's ids, [..., vocabulary]; minus infinity for ids that are not drafted."""
        if not self.reduced:
            return logits
        return spread(logits, self.ids, self._whole)

    def of(self, target: TargetModel, batch: Batch, at: Tensor, places: Tensor) -> Tensor:
        """The target's own logits over the drafted ids, [n, drafted], at n places of a batch."""
        return self.head(target).of(batch, (at, places))


class DraftsPart(Learned):
    """A module that drafts a part of the target's vocabulary, or all of it.

    Attributes:
        drafted: the ids it drafts, chosen from the first texts it learns.
    """

    drafted: DraftVocabulary
    _chooses = False  # the ids are still to be chosen

    def take(self, tensors: Mapping[str, Tensor], where: str) -> None:
        super().take(tensors, where)
        self.drafted.check(where)

    @classmethod
    def new(cls, config: Any, target: TargetModel) -> Self:
        made = super().new(config, target)
        made._chooses = True
        return made

    def suit(self, counts: Tensor) -> None:
        """Choose the ids to draft; a trained module keeps its own."""
        if self._chooses:
            self.drafted.choose(counts)
        self._chooses = False


def spread(values: Tensor, ids: Tensor, size: int, others: float = -torch.inf) -> Tensor:
    """Values [..., n] of some ids as those of all, [..., size]; ``others`` for the other ids."""
    full = values.new_full((*values.shape[:-1], size), others)
    full[..., ids] = values
    return full
