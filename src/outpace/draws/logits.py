"""The target's logits at the nodes of a draft, and their substitute in a process that has none."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import OutpaceError
from outpace.transfer import upload


def tokens_only(reader: str = "this") -> OutpaceError:
    """The error for a reader of the target's logits where there are its tokens alone."""
    return OutpaceError(
        f"there are no logits for {reader}: ranks that share drafts exchange the target's tokens; use "
        "verifier='match' without logits processors, min_tokens and logprobs, or one rank"
    )


class Logits:
    """The target's logits for one sequence at one step, sliced lazily; node -1 is the root.

    Args:
        rows: logits of the whole forward, shape [N, vocabulary].
        first: index of the root's row.
        count: number of the sequence's rows, the root's included; by default all from ``first`` on.
    """

    def __init__(self, rows: Tensor, first: int = 0, count: int | None = None) -> None:
        self._rows = rows
        self._first = first
        self._count = len(rows) - first if count is None else count

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def rows(self) -> Tensor:
        """All rows of the sequence, shape [1 + nodes, vocabulary]."""
        return self._rows[self._first : self._first + self._count]

    def __getitem__(self, node: int) -> Tensor:
        return self._rows[self._first + 1 + node]

    def gather(self, nodes: Seq[int]) -> Tensor:
        """The rows of n nodes, shape [n, vocabulary]."""
        rows = [self._first + 1 + node for node in nodes]
        return self._rows[rows if self.device.type == "cpu" else upload(rows, self.device)]

    def copied(self, node: int) -> Tensor | NDArray[np.float32]:
        """A copy of a row, which is valid after the next forward too."""
        rows = self._rows
        if rows.device.type == "cpu" and rows.dtype == torch.float32 and not rows.requires_grad:
            copy: NDArray[np.float32] = rows.numpy()[self._first + 1 + node].copy()  # faster than torch's
            return copy
        return rows[self._first + 1 + node].clone()

    def select(self, nodes: Seq[int]) -> Logits:
        """The rows of the root and of some nodes, as the logits of a separate draft."""
        return SelectedLogits(self, nodes)

    def top(self, nodes: Seq[int], count: int) -> NDArray[np.int64]:
        """The ``count`` most probable tokens after n nodes, in descending order, shape [n, count].

        Fewer if the vocabulary has fewer.
        """
        rows = self.gather(nodes)
        best: NDArray[np.int64] = rows.topk(min(count, rows.shape[-1]), dim=-1).indices.cpu().numpy()
        return best


class SelectedLogits(Logits):
    """The logits of a part of a draft, indexed by the part's own nodes.

    Args:
        whole: the logits of the full draft.
        nodes: for each node of the part, its node in the full draft.
    """

    def __init__(self, whole: Logits, nodes: Seq[int]) -> None:
        self._whole = whole
        self._nodes = [*nodes, -1]  # the root is the last entry, so index -1 maps to it

    @property
    def device(self) -> torch.device:
        return self._whole.device

    @property
    def rows(self) -> Tensor:
        return self.gather(range(-1, len(self._nodes) - 1))

    def __getitem__(self, node: int) -> Tensor:
        return self._whole[self._nodes[node]]

    def gather(self, nodes: Seq[int]) -> Tensor:
        return self._whole.gather([self._nodes[node] for node in nodes])

    def copied(self, node: int) -> Tensor | NDArray[np.float32]:
        return self._whole.copied(self._nodes[node])


class DrawnTokens(Logits):
    """The target's tokens after the root and the nodes of a draft, for a process without the logits.

    Args:
        tokens: a row per node, root first, as returned by ``own_tokens.told_columns``.
        plain: the value passed to ``told_columns``.
    """

    def __init__(self, tokens: NDArray[np.int32], plain: bool) -> None:
        self._tokens = tokens
        self._plain = plain

    @property
    def own(self) -> dict[int, int]:
        """Node -> the target's own token after it, -1 being the root."""
        return dict(enumerate(self._tokens[:, 0].tolist(), -1))

    @property
    def _rows(self) -> Tensor:  # type: ignore[override]  # what every reader of logits begins with
        raise tokens_only()

    def select(self, nodes: Seq[int]) -> DrawnTokens:
        return DrawnTokens(self._tokens[[0, *(node + 1 for node in nodes)]], self._plain)

    def drawn(self, nodes: Seq[int], argmax: bool) -> list[int]:
        """The tokens of ``guess`` after these nodes; with ``argmax`` the most probable tokens."""
        column = 0 if self._plain else 2 if argmax else 1
        tokens: list[int] = self._tokens[[node + 1 for node in nodes], column].clip(min=0).tolist()
        return tokens

    def top(self, nodes: Seq[int], count: int) -> NDArray[np.int64]:
        first = 1 if self._plain else 3
        return self._tokens[[node + 1 for node in nodes], first : first + count].astype(np.int64)
