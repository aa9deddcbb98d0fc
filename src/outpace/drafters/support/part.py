"""Options of drafters whose head has the whole vocabulary, and may have a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from outpace.drafters.support.continuing import ContinuingDrafter
from outpace.learned.frequent import drafted_of, drafted_of_tables
from outpace.targets.base import TargetModel

_NONE: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class PartDrafter(ContinuingDrafter):
    """Base class of drafters that draft all of the vocabulary, or a part of it.

    Attributes:
        draft_vocabulary: the tokens that are drafted, fewer than the head has, which costs most of a draft
            where a vocabulary is large: their number; a .json file with a list of ids, or a .safetensors file
            with EAGLE-3's ``d2t`` or ``t2d``; or the ids. By default those of such tables in the drafter's
            own file, otherwise all.
        draft_text: a file of text whose most frequent tokens are drafted, by default a quarter of the
            vocabulary and at least 16,384. Without it, a number takes the first tokens of the vocabulary,
            which are the most common ones in most.
    """

    draft_vocabulary: Any = None
    draft_text: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.draft_vocabulary
        if isinstance(given, Tensor | list | range):  # drafters are compared
            ids = given.tolist() if isinstance(given, Tensor) else given
            object.__setattr__(self, "draft_vocabulary", tuple(ids))

    def drafted(self, target: TargetModel, tables: Mapping[str, Tensor] = _NONE) -> Tensor | None:
        """The target's ids that are drafted, [n]; None for all.

        Args:
            tables: of the drafter's own file.

        Raises:
            OutpaceError: an option is wrong.
        """
        asked = self.draft_vocabulary is not None or self.draft_text is not None
        given = self.draft_vocabulary if asked else drafted_of_tables(tables)
        if given is None and not asked:
            return None
        ids = drafted_of(given, self.draft_text, target, self.name)
        return None if len(ids) == target.vocabulary else ids
