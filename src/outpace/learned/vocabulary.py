"""The part of the target's vocabulary that a drafter drafts.

The head of a large vocabulary costs more than the layers of a small drafter, in training and in drafting, and
most of a text consists of few tokens (Zhao et al. 2025, FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.learned.formats import MASK_ENTRIES
from outpace.learned.learned import Fit, Learned, PartialHead
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
    def choose(self, ids: Tensor) -> None:
        """Draft these ids, ascending, as many as there are."""
        self.ids.copy_(ids)
        self._head = None

    def head(self, target: TargetModel) -> PartialHead:
        """The target's head over the drafted ids."""
        if self._head is None:
            self._head = PartialHead(target, self.part)
        return self._head

    def revision(self, target: TargetModel) -> int:
        """See ``PartialHead``."""
        return self.head(target).revision()

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the target's ids, [..., vocabulary]; minus infinity for ids that are not drafted."""
        if not self.reduced:
            return logits
        return spread(logits, self.ids, self._whole)


class DraftsPart(Learned):
    """A module that drafts a part of the target's vocabulary, or all of it.

    Attributes:
        drafted: the ids it drafts, chosen from the first texts it learns.
    """

    drafted: DraftVocabulary

    def take(self, tensors: Mapping[str, Tensor], where: str) -> None:
        super().take(tensors, where)
        self.drafted.check(where)


def spread(values: Tensor, ids: Tensor, size: int, others: float = -torch.inf) -> Tensor:
    """Values [..., n] of some ids as those of all, [..., size]; ``others`` for the other ids."""
    full = values.new_full((*values.shape[:-1], size), others)
    full[..., ids] = values
    return full


def drafted_ids(model: Any) -> Tensor | None:
    """The ids that a model was trained to draft, [n], ascending, by its config; None for all of them.

    Such a model is a Llama that ``outpace train`` made: its head is a matrix, without a bias or a scale.

    Args:
        model: a transformers model, or None.

    Raises:
        OutpaceError: they are not ids of its vocabulary, or it is no Llama.
    """
    config: Any = getattr(model, "config", None)
    listed = getattr(config, "draft_vocabulary_ids", None)
    if listed is None:
        return None
    ids = listed if isinstance(listed, list) and all(type(one) is int for one in listed) else []
    if not ids or ids != sorted({*ids}) or not 0 <= ids[0] <= ids[-1] < config.vocab_size:
        raise OutpaceError(
            f"draft_model: draft_vocabulary_ids in the config of {config.name_or_path or 'the model'} must "
            f"be ascending ids below {config.vocab_size}"
        )
    if config.model_type != "llama":
        raise OutpaceError(
            "draft_model: a model of the type llama can draft a part of its vocabulary, not one of the type "
            f"{config.model_type}; take draft_vocabulary_ids out of its config"
        )
    return None if len(ids) == config.vocab_size else torch.tensor(ids, device=model.device)


def mask_token(model: TargetModel) -> int | None:
    """The token of places that a draft model fills all in one forward (PARD), by its config; None for none.

    Raises:
        OutpaceError: it is not a token of the model.
    """
    config: Any = getattr(model.model, "config", None)
    told = [getattr(config, name, None) for name in MASK_ENTRIES]
    mask = next((one for one in told if one is not None), None)
    if mask is not None and not (type(mask) is int and 0 <= mask < model.vocabulary):
        raise OutpaceError(
            f"draft_model: the masked token in the config of {model.name} must be an id below "
            f"{model.vocabulary}, not {mask!r}; take {' and '.join(MASK_ENTRIES)} out of its config"
        )
    return mask
