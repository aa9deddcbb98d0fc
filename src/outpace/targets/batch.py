"""The rows of a forward, of all sequences one after the other, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import Slot
from outpace.draws.own_tokens import Tree
from outpace.native.pointers import check
from outpace.targets.rows import Output, Rows
from outpace.tree import is_chain

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """One forward: S sequences, N rows, of which M are read.

    The rows of a slot follow its committed ones in the cache. They may go on with a tree of which some rows
    were fed by forwards before and kept: these, ``fed``, are then the slot's last committed ones.

    Attributes:
        slots: of the sequences, each of which feeds at least one row.
        starts: [S + 1]; rows of slot i are starts[i] .. starts[i + 1].
        fed: [S]; number of the rows of its tree that were fed before.
        prompts: [S]; how many of its first rows are a prompt's, which a backend may compute by other kernels.
        tokens: [N].
        parents: [N + sum of fed]; nodes of each slot's tree, those fed before first: a node before it, or -1
            for the last row before the tree.
        read: [M]; rows whose logits are wanted, in ascending order.
        asked: for a target that ``tells``: slot -> the nodes after which it returns its tokens. (``first`` is
            ignored.)
    """

    slots: tuple[Slot, ...]
    starts: IntArray
    fed: IntArray
    prompts: IntArray
    tokens: IntArray
    parents: IntArray
    read: IntArray
    asked: Mapping[Slot, Tree] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        feeds: Mapping[Slot, Rows | Sequence[int]],
        logits_from: int | None = 0,
        prompt: int | None = None,
    ) -> Batch:
        """The batch of what each slot feeds.

        Args:
            feeds: slot -> its rows, or the tokens of a chain.
            logits_from: the first row of each slot that is read; None for none.
            prompt: how many of each slot's first rows are a prompt's; by default all if none is read,
                otherwise none.
        """
        building = Building()
        for slot, given in feeds.items():
            rows = given if isinstance(given, Rows) else Rows(given)
            count = len(rows.tokens)
            first = count if logits_from is None else logits_from
            told = (count if logits_from is None else 0) if prompt is None else min(prompt, count)
            building.add(slot, rows, first, told)
        return building.made()

    @property
    def widths(self) -> IntArray:
        """Number of rows of each slot, [S]."""
        return np.diff(self.starts)

    @property
    def width_by_slot(self) -> dict[Slot, int]:
        """Number of rows of each slot, as caches are asked to make room for them."""
        return dict(zip(self.slots, self.widths.tolist(), strict=True))

    @cached_property
    def rows(self) -> Mapping[Slot, Rows]:
        """The rows of each slot, with parents unless they are a chain of its own."""
        return {slot: self._rows(number) for number, slot in enumerate(self.slots)}

    def _rows(self, number: int) -> Rows:
        start, stop = self.starts[number : number + 2].tolist()
        before, fed = start + int(self.fed[:number].sum()), int(self.fed[number])
        tree = self.parents[before : before + fed + stop - start].tolist()
        tokens = self.tokens[start:stop].tolist()
        return Rows(tokens) if not fed and is_chain(tree) else Rows(tokens, tree[fed:], tree[:fed])

    @cached_property
    def reads(self) -> Mapping[Slot, IntArray]:
        """The rows of each slot that are read, counted from its first."""
        ends = np.searchsorted(self.read, self.starts)
        return {
            slot: self.read[ends[number] : ends[number + 1]] - self.starts[number]
            for number, slot in enumerate(self.slots)
        }

    @cached_property
    def spans(self) -> Mapping[Slot, slice]:
        """Where the logits of each slot are among those of all, [M, vocabulary]."""
        ends = np.searchsorted(self.read, self.starts).tolist()
        return {slot: slice(ends[number], ends[number + 1]) for number, slot in enumerate(self.slots)}

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

    def select(self, slots: Sequence[Slot | None]) -> tuple[Batch, IntArray | None]:
        """The part of it that ``slots`` feed, in their order.

        Returns:
            The batch, and its rows' numbers in this one, [N]; None if it is this one.
        """
        place = {slot: number for number, slot in enumerate(self.slots)}
        order = [place[slot] for slot in slots if slot in place]
        if order == list(range(len(self.slots))):
            return self, None
        widths, nodes = self.widths, np.concatenate([[0], np.cumsum(self.widths + self.fed)])
        chosen = [np.arange(self.starts[i], self.starts[i + 1]) for i in order]
        rows = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
        wanted = np.zeros(len(self.tokens), dtype=np.bool_)
        wanted[self.read] = True
        trees = [self.parents[nodes[i] : nodes[i + 1]] for i in order]
        batch = replace(
            self,
            slots=tuple(self.slots[i] for i in order),
            starts=np.concatenate([[0], np.cumsum(widths[order])]).astype(np.int32),
            fed=self.fed[order],
            prompts=self.prompts[order],
            tokens=self.tokens[rows],
            parents=np.concatenate(trees) if trees else self.parents[:0],
            read=np.flatnonzero(wanted[rows]).astype(np.int32),
            asked={slot: tree for slot, tree in self.asked.items() if slot in slots},
        )
        return batch, rows.astype(np.int32)

    def output(self, logits: Tensor | None, hidden: Mapping[int, Tensor]) -> Output:
        """Outputs of a forward of this batch.

        Args:
            logits: of the rows that are read, [M, vocabulary]; None if none are wanted.
            hidden: layer -> [N, hidden size].
        """
        at = self.starts.tolist()
        states = {
            slot: {layer: rows[at[i] : at[i + 1]] for layer, rows in hidden.items()}
            for i, slot in enumerate(self.slots)
        }
        return Output(logits, self.spans if logits is not None else {}, states if hidden else {})


class Building:
    """A batch to which slots are added one after the other."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._widths: list[int] = []
        self._fed: list[int] = []
        self._prompts: list[int] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._read: list[int] = []
        self._asked: dict[Slot, Tree] = {}

    def add(self, slot: Slot, rows: Rows, read: int = 0, prompt: int = 0, asked: Tree | None = None) -> None:
        """Add a slot, unless it has no rows.

        Args:
            read: its first row whose logits are wanted.
            prompt: how many of its first rows are a prompt's.
        """
        count, start = len(rows.tokens), len(self._tokens)
        if not count:
            return
        self._slots.append(slot)
        self._widths.append(count)
        self._fed.append(len(rows.fed))
        self._prompts.append(prompt)
        self._tokens.extend(rows.tokens)
        self._parents.extend(rows.tree)
        self._read.extend(range(start + read, start + count))
        if asked is not None:
            self._asked[slot] = asked

    def made(self) -> Batch:
        """The batch of what was added."""
        return Batch(
            tuple(self._slots),
            np.array([0, *accumulate(self._widths)], dtype=np.int32),
            np.array(self._fed, dtype=np.int32),
            np.array(self._prompts, dtype=np.int32),
            np.array(self._tokens, dtype=np.int32),
            np.array(self._parents, dtype=np.int32),
            np.array(self._read, dtype=np.int32),
            self._asked,
        )
