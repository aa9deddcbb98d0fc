"""A target that runs on several ranks, controlled by the first.

Everything an engine does (requests, drafts, plans, draws, errors) happens only on rank 0, where this target
represents all ranks. The others repeat its cache operations and forwards in the same order, so they cannot
diverge. One message is sent per forward, with all cache operations since the last.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from outpace.cache import Cache, Slot
from outpace.core import Draft, OutpaceError, SamplingParams, UnsupportedModel
from outpace.draws.noise import Key
from outpace.draws.own_tokens import Tree
from outpace.draws.sampling import Processor
from outpace.targets.around import WrappedCache, WrappedTarget
from outpace.targets.base import TargetModel, checked_cache
from outpace.targets.batch import Batch
from outpace.targets.rows import Output

_PLAIN = Processor(SamplingParams(), ())
_PLAIN_KEY = Key(0)


class Leader(Protocol):
    """The part of ``Ranks`` that a led target needs."""

    size: int

    def telling(self, message: Any) -> AbstractContextManager[None]: ...


class Follower(Protocol):
    """The part of ``Ranks`` that ``follow`` needs."""

    def hear(self) -> Any: ...
    def lost(self, error: Exception) -> Exception: ...


class _Asked(NamedTuple):
    """A tree without the data that its rows contain; processor and key only if needed."""

    nodes: int
    top: int
    drawn: tuple[Processor, Key, int] | None

    @classmethod
    def from_tree(cls, tree: Tree) -> _Asked:
        plain = tree.processor.plain
        return cls(len(tree.draft), tree.top, None if plain else (tree.processor, tree.key, tree.root))

    def tree(self, tokens: Sequence[int], parents: Sequence[int], root: int) -> Tree:
        """The tree of rows whose root is row ``root``."""
        stop = root + 1 + self.nodes
        draft = Draft(tokens[root + 1 : stop], [parent - root - 1 for parent in parents[root + 1 : stop]])
        processor, key, index = self.drawn or (_PLAIN, _PLAIN_KEY, 0)
        return Tree(0, draft, processor, key, index, self.top)


class _Forward(NamedTuple):
    """A message: the calls on caches, and the forward after them.

    Attributes:
        slots: numbers of the batch's slots, which it leaves out, as it does ``Batch.asked``.
        asked: of the slots, in their order.
    """

    calls: list[tuple[Any, ...]]
    cache: int
    slots: list[int]
    batch: Batch
    asked: list[_Asked | None]
    hidden_layers: tuple[int, ...]

    @classmethod
    def of(
        cls, calls: list[tuple[Any, ...]], cache: int, batch: Batch, hidden_layers: Sequence[int]
    ) -> _Forward:
        trees = (batch.asked.get(slot) for slot in batch.slots)
        asked = [None if tree is None else _Asked.from_tree(tree) for tree in trees]
        numbers = [slot.number for slot in batch.slots]
        return cls(calls, cache, numbers, replace(batch, slots=(), asked={}), asked, tuple(hidden_layers))

    def batch_of(self, slots: Sequence[Slot]) -> Batch:
        """The batch of these slots, of which the first row that is read is the root of what is asked."""
        batch = replace(self.batch, slots=tuple(slots))
        trees = {
            slot: asked.tree(batch.rows[slot].tokens, batch.rows[slot].tree, int(batch.reads[slot][0]))
            for slot, asked in zip(slots, self.asked, strict=True)
            if asked is not None
        }
        return replace(batch, asked=trees)


@dataclass(eq=False)
class _RankBlock:
    """Rows copied on every rank; ``rows`` are those of this one."""

    number: int
    rows: Any


class LedCache(WrappedCache):
    """The leader's cache, which records its calls for the other ranks to repeat.

    Args:
        calls: list to which calls are appended.
        shared_memory: number of ranks whose rows share this memory.
    """

    def __init__(self, inner: Cache, number: int, calls: list[tuple[Any, ...]], shared_memory: int) -> None:
        super().__init__(inner)
        self.number, self._calls = number, calls
        self._shared_memory = shared_memory
        self._blocks = itertools.count()
        weakref.finalize(self, calls.append, (number, "drop"))

    @property
    def row_bytes(self) -> int:
        return self.inner.row_bytes * self._shared_memory

    @property
    def bytes(self) -> int:
        return self.inner.bytes * self._shared_memory

    def _note(self, name: str, *arguments: Any) -> None:
        self._calls.append((self.number, name, *arguments))

    def allocate(self, rows: int = 0) -> Slot:
        slot = self.inner.allocate(rows)
        self._note("allocate", slot.number, rows)
        return slot

    def free(self, slot: Slot) -> None:
        self.inner.free(slot)
        self._note("free", slot.number)

    def reserve(self, slot: Slot, rows: int) -> None:
        self.inner.reserve(slot, rows)
        self._note("reserve", slot.number, rows)

    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        self.inner.keep(paths)
        self._note("keep", {slot.number: path for slot, path in paths.items()})

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        self.inner.truncate(slot, length, path)
        self._note("truncate", slot.number, length, path)

    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> AbstractContextManager[None]:
        raise OutpaceError("a target on several ranks does not draft with itself; use another drafter")

    def read_rows(self, slot: Slot, start: int, stop: int) -> _RankBlock:
        block = _RankBlock(next(self._blocks), self.inner.read_rows(slot, start, stop))
        self._note("read_rows", slot.number, start, stop, block.number)
        weakref.finalize(block, self._calls.append, (self.number, "forget", block.number))
        return block

    def write_rows(self, slot: Slot, block: _RankBlock) -> None:
        self.inner.write_rows(slot, block.rows)
        self._note("write_rows", slot.number, block.number)


class LedTarget(WrappedTarget):
    """Rank 0's part of a target, which represents all ranks; the others ``follow``.

    An error on any rank ends all of them, with ``RanksLost``. Hidden states, embeddings and head, which
    drafters with trained parts need, are spread over several ranks and are refused.

    Args:
        inner: this rank's part, made in the same way on every rank.
        ranks: the processes.

    Raises:
        UnsupportedModel: an encoder-decoder model, or a target with a cache of fixed shapes.
    """

    def __init__(self, inner: TargetModel, ranks: Leader) -> None:
        if inner.has_encoder or inner.new_cache(1, 1).static:
            raise UnsupportedModel(
                "decoder-only models with caches that grow run on several ranks; use one for this model"
            )
        self.wrap(inner)
        self.ranks = ranks
        self.tells = inner.tells
        self._calls: list[tuple[Any, ...]] = []
        self._numbers = itertools.count()

    @property
    def identity(self) -> str:
        return f"{self.inner.identity}, on {self.ranks.size} ranks"

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> LedCache:
        inner, number = self.inner.new_cache(slots, length, capacity), next(self._numbers)
        self._calls.append((number, "new", slots, length, capacity))
        return LedCache(inner, number, self._calls, self.ranks.size if self.device.type == "cpu" else 1)

    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        led = checked_cache(self, cache, LedCache)
        calls = list(self._calls)
        del self._calls[: len(calls)]  # one that is noted meanwhile, when a cache is freed, is sent later
        with self.ranks.telling(_Forward.of(calls, led.number, batch, hidden_layers)):
            return self.inner.forward(led.inner, batch, hidden_layers)


class _Mirror:
    """A follower's caches, by the leader's numbers."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self._caches: dict[int, Cache] = {}
        self._slots: dict[tuple[int, int], Slot] = {}
        self._blocks: dict[tuple[int, int], Any] = {}

    def forward(self, message: _Forward) -> None:
        for cache, name, *arguments in message.calls:
            self._call(cache, name, *arguments)
        batch = message.batch_of([self._slots[message.cache, number] for number in message.slots])
        self._target.forward(self._caches[message.cache], batch, message.hidden_layers)

    def _call(self, number: int, name: str, *arguments: Any) -> None:
        if name == "new":
            self._caches[number] = self._target.new_cache(*arguments)
            return
        if name == "drop":
            del self._caches[number]
            for found in (self._slots, self._blocks):
                for key in [key for key in found if key[0] == number]:
                    del found[key]
            return
        cache = self._caches[number]
        if name == "forget":
            del self._blocks[number, arguments[0]]
        elif name == "keep":
            cache.keep({self._slots[number, slot]: path for slot, path in arguments[0].items()})
        elif name == "allocate":
            self._slots[number, arguments[0]] = cache.allocate(arguments[1])
        elif name == "read_rows":
            slot, start, stop, block = arguments
            self._blocks[number, block] = cache.read_rows(self._slots[number, slot], start, stop)
        elif name == "write_rows":
            cache.write_rows(self._slots[number, arguments[0]], self._blocks[number, arguments[1]])
        elif name == "free":
            cache.free(self._slots.pop((number, arguments[0])))
        else:
            getattr(cache, name)(self._slots[number, arguments[0]], *arguments[1:])


def follow(target: TargetModel, ranks: Follower) -> None:
    """Repeat the leader's operations on this rank until it ends.

    Args:
        target: this rank's part, made in the same way as the leader's.

    Raises:
        RanksLost: this rank, or another, has failed.
    """
    mirror = _Mirror(target)
    while (message := ranks.hear()) is not None:
        try:
            mirror.forward(message)
        except Exception as error:
            raise ranks.lost(error) from error
