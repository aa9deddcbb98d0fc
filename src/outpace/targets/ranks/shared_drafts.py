"""Lookahead parallelism: each rank has the whole model and verifies a share of every draft.

Fu et al. 2024 (arXiv 2402.02057), section 3.4, for the draft of any drafter that reads no hidden states. A
rank feeds each tree's root and the paths to its own leaves, and the ranks exchange only the target's own
token after each node: one all_reduce per step. An accepted node was fed by one or several ranks; the others
miss its row, and feed it before the next root. A node's ancestors are fed with it, so a rank that misses a
row of the accepted path misses all later ones.

Differences from the paper: its branches are the window's columns and the n-grams; here they are the paths of
the merged tree. There each rank refills only its own columns; here all ranks know all tokens, so the draft
and the steps are those of one process.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outpace.cache import Cache, Slot
from outpace.core import OutpaceError, UnsupportedModel
from outpace.draws.logits import DrawnTokens, tokens_only
from outpace.draws.own_tokens import Tree, told_columns
from outpace.targets.around import WrappedCache, WrappedTarget
from outpace.targets.base import TargetModel, checked_cache
from outpace.targets.batch import Batch, Building
from outpace.targets.rows import Output, Rows
from outpace.tree import children, path_to

_UNTOLD = -2  # less than every token, and than NO_TOKEN
_MOST = 0.8  # maximum share of the nodes that the busiest rank feeds if drafts are shared


class Peers(Protocol):
    """The processes that share drafts: ``Ranks``, or a test's substitute.

    Attributes:
        rank: this process's rank, from 0.
        size: number of processes.
    """

    rank: int
    size: int

    def agree(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """The maximum over all ranks, element by element."""


@lru_cache(maxsize=256)
def deal(parents: tuple[int, ...], size: int) -> list[list[int]]:
    """The nodes of a draft that each rank feeds, ascending, including ancestors.

    Each path to a leaf, the longest first, is assigned to the rank with the fewest nodes after adding it.
    """
    below = children(parents)
    leaves = [node for node in range(len(parents)) if not below[node]]
    paths = sorted((path_to(parents, leaf) for leaf in leaves), key=lambda path: (-len(path), path))
    shares: list[set[int]] = [set() for _ in range(size)]
    for path in paths:
        least = min(shares, key=lambda share: len(share.union(path)))
        least.update(path)
    return [sorted(share) for share in shares]


def typical(nodes: int) -> tuple[int, ...]:
    """Parents of a draft of this many nodes: a lookahead window (W = 7, N = 5), then chains of 4."""
    window = [-1, 0, 1, 2, 3, 4]
    above = [-1, *range(6)]
    for _ in range(3):
        window += above
        above = list(range(len(window) - 7, len(window)))
    chains = (parent for node in itertools.count(len(window), 4) for parent in (-1, node, node + 1, node + 2))
    return tuple(itertools.islice(itertools.chain(window, chains), nodes))


@dataclass
class Traffic:
    """Totals of the steps so far, of this rank.

    Attributes:
        steps: forwards over drafts, and how many of them were ``shared``.
        rows: number of rows that this rank fed in those.
        whole: number of rows that one process would have fed.
        bytes: bytes of tokens exchanged between the ranks.
    """

    steps: int = 0
    shared: int = 0
    rows: int = 0
    whole: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class _SlotPart:
    """One slot's part of a forward.

    Attributes:
        tokens: its rows, as one process would feed them.
        fed_as: row -> its row in this rank's own feed.
        nodes: the draft's nodes among them.
        rows: this rank's own feed: the rows that it missed, the text up to the root, its share.
        head: number of its rows before the root.
    """

    tokens: Sequence[int]
    fed_as: dict[int, int]
    nodes: Sequence[int]
    rows: Rows
    head: int


class ParallelCache(WrappedCache):
    """A rank's own cache, and the tokens of committed rows that it missed.

    A slot's rows are those of the text; its last ones may be missing here.

    Args:
        inner: the rank's own, empty.
        feed: writes missing rows: called with slot -> tokens.
    """

    def __init__(self, inner: Cache, feed: Callable[[Cache, Mapping[Slot, Rows]], object]) -> None:
        super().__init__(inner)
        self._feed = feed
        self.missed: dict[Slot, list[int]] = {}
        self.fed: dict[Slot, _SlotPart] = {}

    def allocate(self, rows: int = 0) -> Slot:
        slot = self.inner.allocate(rows)
        self.missed[slot] = []
        return slot

    def free(self, slot: Slot) -> None:
        self.inner.free(slot)
        del self.missed[slot]

    def length(self, slot: Slot) -> int:
        return self.inner.length(slot) + len(self.missed[slot])

    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        kept = {}
        for slot, path in paths.items():
            fed, missed = self.fed[slot], len(self.missed[slot])
            there = [row for row in path if row in fed.fed_as]
            kept[slot] = [*range(missed), *(fed.fed_as[row] for row in there)]
            self.missed[slot] = [fed.tokens[row] for row in path[len(there) :]]
        self.inner.keep(kept)
        self.fed = {}

    def fill(self, slot: Slot) -> None:
        """Feed the missed rows of a slot."""
        if self.missed[slot]:
            self._feed(self.inner, {slot: Rows(self.missed[slot])})
            self.inner.keep({slot: range(len(self.missed[slot]))})
            self.missed[slot] = []

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        self.fill(slot)
        self.inner.truncate(slot, length, path)

    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> AbstractContextManager[None]:
        raise tokens_only("a step in parts")

    def read_rows(self, slot: Slot, start: int, stop: int) -> Any:
        if stop > self.inner.length(slot):
            self.fill(slot)
        return self.inner.read_rows(slot, start, stop)

    def write_rows(self, slot: Slot, block: Any) -> None:
        self.fill(slot)
        self.inner.write_rows(slot, block)


class ParallelTarget(WrappedTarget):
    """This rank's part of a target whose ranks share the rows of drafts; ``LedTarget`` calls all of them.

    It returns the target's tokens instead of logits, for the verifier ``match``, greedy and sampled, with
    penalties and bias.

    Attributes:
        least: minimum number of rows of a forward, over all sequences, for its drafts to be shared; every
            rank runs narrower ones in full, and the first one's tokens are used. ``math.inf`` shares none.
        traffic: totals of rows fed and bytes exchanged.

    Args:
        inner: the whole target.
        peers: the processes that share.

    Raises:
        UnsupportedModel: an encoder-decoder model, or a target with a cache of fixed shapes.
    """

    tells = True

    def __init__(self, inner: TargetModel, peers: Peers) -> None:
        if inner.has_encoder or inner.tells or inner.new_cache(1, 1).static:
            raise UnsupportedModel(
                "drafts are shared between ranks for decoder-only models with caches that grow; leave "
                "--parallel draft (or static=True) out"
            )
        if inner.prompts_differ:
            raise UnsupportedModel(
                "rows of this model have other bits in steps than in prompts, and ranks feed each other's "
                "rows again without telling which they are; leave --parallel draft out"
            )
        self.wrap(inner)
        self.peers = peers
        self.least: float = 2
        self.traffic = Traffic()

    @property
    def identity(self) -> str:
        return f"{self.inner.identity}, drafts shared by {self.peers.size} ranks"

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> ParallelCache:
        inner = self.inner

        def feed(cache: Cache, feeds: Mapping[Slot, Rows]) -> None:
            inner.forward(cache, Batch.of(feeds, None))

        return ParallelCache(inner.new_cache(slots, length, capacity), feed)

    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        kv = checked_cache(self, cache, ParallelCache)
        if hidden_layers or any(len(rows) and slot not in batch.asked for slot, rows in batch.reads.items()):
            raise tokens_only("a forward whose logits or hidden states are read")
        if batch.fed.any():
            raise OutpaceError("a tree that is fed over several forwards is not shared between ranks")
        whole, reads = len(batch.tokens), len(batch.read) > 0
        roots = {slot: int(rows[0]) if len(rows) else 0 for slot, rows in batch.reads.items()}
        dealt = self._deal(batch, roots) if reads and whole >= self.least else None
        shares = dealt is not None
        kv.fed = {
            slot: _part(kv.missed[slot], rows, roots[slot], None if dealt is None else dealt[slot])
            for slot, rows in batch.rows.items()
        }
        building = Building()
        for slot, part in kv.fed.items():
            tells = slot in batch.asked and (shares or not self.peers.rank)
            building.add(slot, part.rows, read=part.head if tells else len(part.rows.tokens))
        if reads:
            self.traffic.steps += 1
            self.traffic.shared += shares
            self.traffic.whole += whole
            self.traffic.rows += sum(len(part.rows.tokens) for part in kv.fed.values())
        output = self.inner.forward(kv.inner, building.made())
        if output.logits is None:
            return output
        return Output(None, {}, told=self._tell(output, kv.fed, batch.asked, shares))

    def _deal(self, batch: Batch, roots: Mapping[Slot, int]) -> dict[Slot, list[int]] | None:
        """This rank's nodes of each draft; None if sharing would save the busiest rank too little.

        Ranks are rotated, so that chains, which are not divided, go to different ones.
        """
        size, rank = self.peers.size, self.peers.rank
        found, busy, nodes = dict[Slot, list[int]](), [0] * size, 0
        for number, (slot, rows) in enumerate(batch.rows.items()):
            root = roots[slot]
            shares = deal(tuple(max(parent - root - 1, -1) for parent in rows.tree[root + 1 :]), size)
            found[slot] = shares[(rank + number) % size]
            busy = [load + len(shares[(dealt + number) % size]) for dealt, load in enumerate(busy)]
            nodes += len(rows.tokens) - root - 1
        return found if max(busy) <= _MOST * nodes else None

    def _tell(
        self, output: Output, fed: Mapping[Slot, _SlotPart], trees: Mapping[Slot, Tree], shares: bool
    ) -> dict[Slot, DrawnTokens]:
        """The target's tokens at all nodes, of all ranks; without ``shares`` at this rank's own nodes."""
        plain = all(tree.processor.plain for tree in trees.values())
        tables = {}
        for slot, tree in trees.items():
            part = fed[slot]
            columns = told_columns(output.logits_of(slot), tree, part.nodes, plain)
            table = np.full((1 + len(tree.draft), columns.shape[1]), _UNTOLD, np.int32)
            table[[0, *(node + 1 for node in part.nodes)]] = columns
            tables[slot] = table
        if shares:
            flat = np.concatenate([table.ravel() for table in tables.values()])
            self.traffic.bytes += flat.nbytes
            agreed = self.peers.agree(flat)
            ends = list(itertools.accumulate(table.size for table in tables.values()))
            pieces = np.split(agreed, ends[:-1])
            tables = {
                slot: piece.reshape(table.shape)
                for (slot, table), piece in zip(tables.items(), pieces, strict=True)
            }
        return {slot: DrawnTokens(table, plain) for slot, table in tables.items()}

    def measure(self, widths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64), repeats: int = 3) -> MeasuredSeconds:
        """Seconds of this model's forwards and of telling, the slowest rank's; all ranks call it together."""
        forwards = {}
        for width in widths:
            cache = self.inner.new_cache(1, 256)
            slot = cache.allocate(64 + width)
            self.inner.forward(cache, Batch.of({slot: [1] * 64}, None))
            cache.keep({slot: range(64)})

            def forward(cache: Cache = cache, slot: Slot = slot, width: int = width) -> None:
                output = self.inner.forward(cache, Batch.of({slot: [1] * width}))
                output.logits_of(slot).argmax(dim=-1).tolist()  # until it is done, on any device
                cache.keep({})

            forwards[width] = self._slowest(forward, repeats)
        tokens = np.zeros(64, np.int32)
        return MeasuredSeconds(forwards, self._slowest(lambda: self.peers.agree(tokens), 3 * repeats))

    def _slowest(self, call: Callable[[], object], repeats: int) -> float:
        taken = []
        for _ in range(1 + repeats):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        microseconds = np.array([1e6 * statistics.median(taken[1:])], np.int32)
        return float(self.peers.agree(microseconds)[0]) / 1e6


def _part(missed: Sequence[int], rows: Rows, root: int, nodes: Sequence[int] | None) -> _SlotPart:
    """The rows of a slot that a rank feeds, whose draft begins after the root's row.

    Args:
        nodes: of the draft, closed under ancestors; None for all.
    """
    chosen = range(len(rows.tokens) - root - 1) if nodes is None else nodes
    taken = [*range(root + 1), *(root + 1 + node for node in chosen)]
    fed_as = {row: len(missed) + at for at, row in enumerate(taken)}
    parents = rows.tree
    above = [*range(-1, len(missed) - 1), *(fed_as.get(parents[row], len(missed) - 1) for row in taken)]
    to_feed = Rows([*missed, *(rows.tokens[row] for row in taken)], above)
    return _SlotPart(rows.tokens, fed_as, chosen, to_feed, len(missed) + root)


@dataclass(frozen=True)
class MeasuredSeconds:
    """Seconds that ``ParallelTarget.measure`` found, the same on all ranks.

    Attributes:
        forwards: rows -> seconds of one rank's forward.
        telling: seconds of an all_reduce over the tokens of a step.
    """

    forwards: Mapping[int, float]
    telling: float
