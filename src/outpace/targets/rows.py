"""The data of a forward: the rows that a target is given, and what it returns for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import Slot
from outpace.core import Draft, OutpaceError
from outpace.draws.logits import DrawnTokens


@dataclass(frozen=True)
class Rows:
    """What one slot feeds in a ``Batch``: tokens, and the tree they form over its committed rows.

    ``parents`` are row indices; -1 is the last committed row. None is a chain.

    A tree may be fed over several forwards, if all rows of each are kept. ``fed`` are then the parents of its
    rows so far, the last ones committed; parents are counted from the tree's first row, and -1 is the row
    before it.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    fed: Sequence[int] = ()

    @property
    def tree(self) -> Sequence[int]:
        """Parents of all rows of the tree: those of ``fed``, then those of ``tokens``."""
        if self.parents is None:
            return range(-1, len(self.tokens) - 1)
        return [*self.fed, *self.parents] if self.fed else self.parents

    def __post_init__(self) -> None:
        if self.fed and self.parents is None:
            raise ValueError("rows that continue a tree need their parents")

    @classmethod
    def under(cls, text: Sequence[int], draft: Draft) -> Rows:
        """A chain of text, whose last token is the root, and the draft below it."""
        root = len(text) - 1
        parents = (*range(-1, root), *(root + 1 + parent for parent in draft.parents))
        return cls((*text, *draft.tokens), parents)


def extra_rows(embeddings: Tensor, table: Tensor | int) -> Tensor:
    """A table of additional embeddings, [n, hidden size], for a model's own [vocabulary, hidden size].

    A given table is not copied, so that later training takes effect.

    Raises:
        OutpaceError: the table has the wrong size.
    """
    if isinstance(table, int):
        return embeddings.detach().mean(dim=0, keepdim=True).repeat(table, 1)
    if table.dim() != 2 or table.shape[1] != embeddings.shape[1]:
        raise OutpaceError(
            f"a table of embeddings for this model is [n, {embeddings.shape[1]}], not {list(table.shape)}"
        )
    return table.detach()


@dataclass(frozen=True)
class Output:
    """Predictions of a model for the rows of a forward; valid until the next forward.

    Attributes:
        logits: [N, vocabulary], all requested rows of all slots, concatenated without padding. None if none
            were requested.
        spans: slot -> range of its rows in ``logits``, in ascending order.
        hidden: slot -> layer -> [width, hidden size], for the requested layers. Layer 0 is the embeddings,
            layer i the output of the i-th block, -1 the input of the head (transformers' ``hidden_states``).
            Rows after those that the slot fed are padding.
        told: slot -> the target's tokens, if it ``tells``; logits are then None.
        pair: logits with an array in the same memory, from a target that keeps both; see ``array``.

    Tensors may be made in inference mode; to train on them, clone them.
    """

    logits: Tensor | None
    spans: Mapping[Slot, slice]
    hidden: Mapping[Slot, Mapping[int, Tensor]] = field(default_factory=dict)
    told: Mapping[Slot, DrawnTokens] = field(default_factory=dict)
    pair: tuple[Tensor, NDArray[np.float32]] | None = None

    @property
    def array(self) -> NDArray[np.float32] | None:
        """The logits as an array, if the target keeps one; None in a copy of its output with other logits."""
        return self.pair[1] if self.pair is not None and self.pair[0] is self.logits else None

    def logits_of(self, slot: Slot) -> Tensor:
        """Logits of a slot's requested rows, [n, vocabulary].

        Raises:
            ValueError: none were requested.
        """
        if self.logits is None:
            raise ValueError("no logits were requested from this forward")
        return self.logits[self.spans[slot]]

    def hidden_of(self, slot: Slot, first: int, count: int) -> dict[int, Tensor]:
        """Hidden states of a slot's rows first .. first + count - 1: layer -> [count, hidden size]."""
        return {layer: states[first : first + count] for layer, states in self.hidden.get(slot, {}).items()}

    @classmethod
    def join(cls, outputs: Sequence[Output]) -> Output:
        """Join the outputs of different slots."""
        if len(outputs) == 1:
            return outputs[0]
        logits = [output.logits for output in outputs if output.logits is not None]
        spans: dict[Slot, slice] = {}
        offset = 0
        for output in outputs:
            for slot, span in output.spans.items():
                spans[slot] = slice(offset + span.start, offset + span.stop)
            offset += 0 if output.logits is None else len(output.logits)
        hidden = {slot: states for output in outputs for slot, states in output.hidden.items()}
        return cls(torch.cat(logits) if logits else None, spans, hidden)


class Reading(NamedTuple):
    """Outputs of a forward without a cache.

    Attributes:
        logits: [B, N, vocabulary].
        hidden: layer -> [B, N, hidden size], as in ``Output``.
    """

    logits: Tensor
    hidden: dict[int, Tensor]


@dataclass(frozen=True)
class HiddenStates:
    """Size, dtype and device of a target's hidden states."""

    size: int
    dtype: torch.dtype
    device: torch.device
