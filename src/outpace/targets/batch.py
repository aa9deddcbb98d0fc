"""The rows of a forward, of all sequences one after the other, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import Cache, Slot
from outpace.native.pointers import check
from outpace.targets.rows import Output, Rows

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """One forward: S sequences, N rows.

    Attributes:
        slots: of the sequences.
        starts: [S + 1]; rows of slot i are starts[i] .. starts[i + 1].
        past: [S]; committed rows of slot i.
        fed: [S]; how many of the last of these belong to the tree that the rows go on with.
        tokens: [N].
        parents: [N + sum of fed]; nodes of each slot's tree, those fed first: a node before it, or -1 for the
            last row before the tree.
        read: [M]; rows whose logits are wanted.
        reads: logits are wanted, even if of no row.
    """

    slots: tuple[Slot, ...]
    starts: IntArray
    past: IntArray
    fed: IntArray
    tokens: IntArray
    parents: IntArray
    read: IntArray
    reads: bool = True

    @classmethod
    def of(cls, cache: Cache, feeds: Mapping[Slot, Rows], logits_from: int | None = 0) -> Batch:
        """The batch of what each slot feeds; logits are of each one's rows from ``logits_from`` on."""
        rows = {slot: row for slot, row in feeds.items() if len(row.tokens)}
        widths = [len(row.tokens) for row in rows.values()]
        starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(widths, out=starts[1:])
        read: list[int] = []
        if logits_from is not None:
            for row, start, stop in zip(
                rows.values(), starts[:-1].tolist(), starts[1:].tolist(), strict=True
            ):
                read.extend(range(start + logits_from + row.unread, stop))
        return cls(
            tuple(rows),
            starts,
            np.array([cache.length(slot) for slot in rows], dtype=np.int32),
            np.array([len(row.fed) for row in rows.values()], dtype=np.int32),
            np.array([token for row in rows.values() for token in row.tokens], dtype=np.int32),
            np.array([parent for row in rows.values() for parent in row.tree], dtype=np.int32),
            np.array(read, dtype=np.int32),
            logits_from is not None,
        )

    @property
    def widths(self) -> IntArray:
        return np.diff(self.starts)

    def check(self) -> None:
        """Refuse what a function in C would follow out of its arrays.

        Raises:
            OutpaceError: a parent that is no earlier node of its tree; a row that is not there.
        """
        nodes = self.widths + self.fed
        first = np.repeat(np.cumsum(nodes) - nodes, nodes)
        own = np.arange(len(self.parents), dtype=np.int32) - first
        trees = len(own) == nodes.sum() and bool(((self.parents >= -1) & (self.parents < own)).all())
        check(trees, "parents that are earlier nodes of a tree")
        rows = len(self.tokens)
        check(bool((self.read >= 0).all() and (self.read < rows).all()), f"{rows} rows")

    def in_order(self, slots: Sequence[Slot | None]) -> tuple[Batch, IntArray | None]:
        """The same, with its sequences in the order in which ``slots`` has them.

        Returns:
            The batch, and its rows' numbers in this one, [N]; None if the order is the same.
        """
        place = {slot: number for number, slot in enumerate(self.slots)}
        order = [place[slot] for slot in slots if slot in place]
        if order == list(range(len(self.slots))):
            return self, None
        widths, nodes = self.widths, np.concatenate([[0], np.cumsum(self.widths + self.fed)])
        starts = np.zeros_like(self.starts)
        np.cumsum(widths[order], out=starts[1:])
        rows = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in order])
        at = np.empty(len(rows), dtype=np.int32)
        at[rows] = np.arange(len(rows))
        batch = replace(
            self,
            slots=tuple(self.slots[i] for i in order),
            starts=starts,
            past=self.past[order],
            fed=self.fed[order],
            tokens=self.tokens[rows],
            parents=np.concatenate([self.parents[nodes[i] : nodes[i + 1]] for i in order]),
            read=np.sort(at[self.read]),
        )
        return batch, rows

    def output(self, logits: Tensor | None, hidden: Mapping[int, Tensor]) -> Output:
        """Outputs of a forward of this batch.

        Args:
            logits: of the rows that are read, [M, vocabulary]; None if none are wanted.
            hidden: layer -> [N, hidden size].
        """
        ends = np.searchsorted(self.read, self.starts).tolist()
        at = self.starts.tolist()
        spans = {slot: slice(ends[i], ends[i + 1]) for i, slot in enumerate(self.slots)}
        states = {
            slot: {layer: rows[at[i] : at[i + 1]] for layer, rows in hidden.items()}
            for i, slot in enumerate(self.slots)
        }
        return Output(logits, spans if logits is not None else {}, states if hidden else {})
