"""Base classes of modules that learn: the training half of ``outpace.learned``.

A module that learns derives from the one that drafts. It has the same weights, config and method, so the
folder of the one is loaded by the other. Authors import everything from here: batches (``batch.py``) and
losses (``losses.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.learned.frequent import most_frequent
from outpace.learned.learned import Learned, PartialHead
from outpace.learned.vocabulary import DraftsPart, DraftVocabulary
from outpace.targets.base import TargetModel
from outpace_lab.train.batch import TrainingBatch
from outpace_lab.train.losses import Losses, Objective, accepted_of_chain, among, measure

__all__ = [
    "Losses",
    "Objective",
    "Trained",
    "TrainedPart",
    "TrainingBatch",
    "accepted_of_chain",
    "among",
    "ids_of",
    "learnable",
    "learnt_logits",
    "logits_among",
    "measure",
    "number",
]


class Trained(Learned):
    """A module that learns.

    Class attributes:
        checkpoint_type: the options when training starts from a model; None if it cannot.
    """

    checkpoint_type: ClassVar[type[Any] | None] = None

    def forward(self, batch: TrainingBatch, objective: Objective) -> Losses:
        """Compute ``loss``; the entry point for wrappers of distributed training."""
        return self.loss(batch, objective)

    @abstractmethod
    def loss(self, batch: TrainingBatch, objective: Objective) -> Losses:
        """The losses of a batch. Each module aligns its logits with the places that they predict."""

    @abstractmethod
    def accepted(self, batch: TrainingBatch) -> Tensor:
        """Number of tokens accepted of the greedy draft whose root is each place's token, [B, T].

        The text is taken as the target's own output.
        """

    @property
    def context(self) -> int | None:
        """Its maximum number of positions; None for the target's."""
        return None

    @property
    def needs_calibration(self) -> bool:
        """Whether ``calibrate`` needs text."""
        return False

    @property
    def writer(self) -> TargetModel:
        """The module as a language model that writes the text for on-policy training.

        Raises:
            OutpaceError: it cannot write text without the target.
        """
        raise OutpaceError(
            f"{self.method} drafts from the target's states at each place, so it cannot write its own text "
            "to learn from; leave out on_policy, or train a draft_model"
        )

    @property
    def drafting_part(self) -> Any:
        """What its drafter's option is given so that it drafts with these weights. By default the module."""
        return self

    def accompany(self, folder: Path, tokenizer: Any) -> None:
        """Write further files to its folder, before training. By default none."""
        del folder, tokenizer

    def calibrate(self, batches: Iterable[TrainingBatch]) -> None:
        """Measure what it needs for drafting, after training, on separate text. By default does nothing."""
        del batches

    def figures(self, batches: Iterable[TrainingBatch]) -> dict[str, float]:
        """Further figures on held-out text, by name. By default none."""
        del batches
        return {}

    def suit(self, counts: Tensor) -> None:
        """Adapt to the texts before the first step. By default does nothing.

        Args:
            counts: how often each of the target's tokens is to be learnt, [vocabulary].
        """
        del counts

    def begin_linearly(self, batches: Iterable[TrainingBatch]) -> None:
        """Solve for the initial weights that have a closed form. By default does nothing.

        Args:
            batches: the texts to be learnt, once.
        """
        del batches

    def at_step(self, step: int, steps: int) -> None:
        """Prepare for update ``step`` of ``steps``, counted from 0. By default does nothing."""
        del step, steps

    def groups(self) -> list[tuple[float, list[nn.Parameter]]]:
        """Groups of its weights, each with a learning rate relative to the run's."""
        return [(1.0, list(self.parameters()))]

    @classmethod
    def of(cls, given: Any, target: TargetModel, pack: bool = True) -> Self:
        """As ``Learned.of``; of a module that drafts only, with its weights."""
        if isinstance(given, Learned) and not isinstance(given, cls) and given.method == cls.method:
            made = cls(given.config, given.fit).to(target.hidden.device)
            return made.drafting(target, given.state_dict(), "the module")
        return super().of(given, target, pack)

    @classmethod
    def begin(cls, draft: str, options: Any, target: TargetModel) -> Self:
        """A module that starts from a model, given by folder or name, in float32, on the target's device.

        Args:
            options: of ``checkpoint_type``.

        Raises:
            OutpaceError: the method trains only from scratch, there is no such model, or it does not fit.
        """
        raise OutpaceError(f"{cls.method} cannot start from a model; train it from scratch")


class TrainedPart(DraftsPart, Trained):
    """A module that learns to draft a part of the target's vocabulary, or all of it."""

    _chooses = False  # the ids are still to be chosen

    @classmethod
    def new(cls, config: Any, target: TargetModel) -> Self:
        made = super().new(config, target)
        made._chooses = True
        return made

    def suit(self, counts: Tensor) -> None:
        """Choose the ids to draft; a trained module keeps its own."""
        if self._chooses and self.drafted.reduced:
            self.drafted.choose(most_frequent(counts, len(self.drafted.ids)))
        self._chooses = False


def number(drafted: DraftVocabulary, tokens: Tensor) -> Tensor:
    """The drafted ids of the target's; -1 for those that are not drafted."""
    if drafted.part is None:
        return tokens
    places = torch.searchsorted(drafted.part, tokens).clamp(max=len(drafted.part) - 1)
    return torch.where(drafted.part[places] == tokens, places, -1)


def ids_of(drafted: DraftVocabulary, numbers: Tensor) -> Tensor:
    """The target's ids of drafted ids."""
    return numbers if drafted.part is None else drafted.part[numbers]


def learnable(drafted: DraftVocabulary, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The places of a batch whose next token is to be learnt and can be drafted.

    Returns:
        Their rows, places and next tokens, the latter by drafted ids, each [n]; and the number of places,
        [1], with those whose token cannot be drafted.
    """
    at, places = batch.ahead(1).nonzero(as_tuple=True)
    labels = number(drafted, batch.labels[at, places])
    kept = labels >= 0
    return at[kept], places[kept], labels[kept], torch.tensor([len(at)], device=at.device)


def learnt_logits(module: DraftsPart, batch: TrainingBatch, at: Tensor, places: Tensor) -> Tensor:
    """The target's own logits over the drafted ids, [n, drafted], at n places of a batch."""
    return logits_among(module.drafted.head(module.target), batch, (at, places))


@torch.no_grad()
def logits_among(head: PartialHead, batch: TrainingBatch, where: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The target's own logits over a head's ids, [places, n], at places of a mask [B, T] or by row and place.

    They are computed for the ids alone, unless the batch has those of all.
    """
    if not head.is_matrix or isinstance(batch.scores, Tensor) or -1 not in batch.hidden:
        return head.among(batch.logits[where])
    return head(batch.hidden[-1][where])
