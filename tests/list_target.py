"""A target and a cache without tensors: a model in plain Python, whose cache is a list of rows per slot."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from outpace.cache import Cache, Slot
from outpace.targets.base import TargetModel, checked_cache
from outpace.targets.batch import Batch
from outpace.targets.rows import Output, Rows
from outpace.tree import depths

Vector = list[float]
Row = list[tuple[Vector, Vector]]  # of each layer a key and a value

_SIZE = 4
_LAYERS = 2


class ListCache(Cache):
    """Lists of committed rows per slot, followed by those of the open forward."""

    copies_rows = True

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.committed: dict[Slot, list[Row]] = {}
        self.fed: dict[Slot, list[Row]] = {}

    def __len__(self) -> int:
        return len(self.committed)

    @property
    def reserved(self) -> int:
        return sum(map(len, self.committed.values()))

    @property
    def row_bytes(self) -> int:
        return 8 * 2 * _LAYERS * _SIZE

    @property
    def bytes(self) -> int:
        return self.reserved * self.row_bytes

    def cost(self, rows: int) -> int:
        return rows

    def allocate(self, rows: int = 0) -> Slot:
        used = {slot.number for slot in self.committed}
        slot = Slot(next(number for number in itertools.count() if number not in used))
        self.committed[slot] = []
        return slot

    def free(self, slot: Slot) -> None:
        if slot not in self.committed:
            raise ValueError("this slot is not in use")
        del self.committed[slot]

    def length(self, slot: Slot) -> int:
        return len(self.committed[slot])

    def room(self, slot: Slot) -> int:
        return len(self.committed[slot])

    def reserve(self, slot: Slot, rows: int) -> None:
        pass

    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        for slot, path in paths.items():
            self.committed[slot] += [self.fed[slot][node] for node in path]
        self.fed = {}

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        rows = self.committed[slot]
        rows[length:] = [rows[length + row] for row in path]

    @contextmanager
    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> Iterator[None]:
        if ahead:
            raise NotImplementedError("no row is ahead in a list")
        lengths = {slot: len(rows) for slot, rows in self.committed.items()}
        try:
            yield
        finally:
            for slot, length in lengths.items():
                del self.committed[slot][length:]

    def read_rows(self, slot: Slot, start: int, stop: int) -> list[Row]:
        return self.committed[slot][start:stop]

    def write_rows(self, slot: Slot, block: list[Row]) -> None:
        self.committed[slot] += block


class ListTarget(TargetModel):
    """A small attention model. Each token has a usual successor; the rows it sees decide about the rest.

    Sums are exact (``math.fsum``), so they do not depend on the order of the rows.

    Args:
        surprise: how much the context counts; less makes a draft model that often agrees.
    """

    dtype = torch.float64

    def __init__(self, vocabulary: int = 16, context: int | None = 96, surprise: float = 1.0) -> None:
        self.vocabulary = vocabulary
        self.context = context
        self.eos_token_ids = frozenset({0})
        self.surprise = surprise
        draw = random.Random(5)

        def matrix(rows: int, columns: int) -> list[Vector]:
            return [[draw.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]

        self._embeddings = matrix(vocabulary, _SIZE)
        self._frequencies = [draw.gauss(0, 1) for _ in range(_SIZE)]
        self._layers = [[matrix(_SIZE, _SIZE) for _ in range(4)] for _ in range(_LAYERS)]
        self._head = matrix(vocabulary, _SIZE)

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> ListCache:
        return ListCache(capacity)

    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        own = checked_cache(self, cache, ListCache)
        assert not hidden_layers
        own.fed = {slot: [] for slot in batch.slots}
        lines: list[Vector] = []
        spans: dict[Slot, slice] = {}
        for slot, row in batch.rows.items():
            first, found = len(lines), self._read(own.committed[slot], own.fed[slot], row)
            lines += [found[read] for read in batch.reads[slot].tolist()]
            spans[slot] = slice(first, len(lines))
        logits = torch.tensor(lines, dtype=torch.float64) if lines else None
        return Output(logits, spans)

    def _read(self, committed: list[Row], fed: list[Row], row: Rows) -> list[Vector]:
        """The logits after each row of a feed; the rows are added to ``fed``."""
        tree, before = row.tree, len(row.fed)
        base = len(committed) - before
        deep = depths(tree)
        logits = []
        for node, token in enumerate(row.tokens, before):
            way = []
            above = node
            while above >= 0:
                way.append(base + above)
                above = tree[above]
            position = base + deep[node]
            state = [
                x + math.sin(position * f)
                for x, f in zip(self._embeddings[token], self._frequencies, strict=True)
            ]
            new: Row = []
            fed.append(new)
            every = committed + fed
            seen = [every[place] for place in (*range(base), *way)]
            for layer, (queries, keys, values, mix) in enumerate(self._layers):
                new.append((_times(keys, state), _times(values, state)))
                query = _times(queries, state)
                weights = [1.5 + math.tanh(_dot(query, other[layer][0])) for other in seen]
                summed = [
                    math.fsum(w * other[layer][1][i] for w, other in zip(weights, seen, strict=True))
                    for i in range(_SIZE)
                ]
                state = [x + math.sin(y) for x, y in zip(state, _times(mix, summed), strict=True)]
            own = [self.surprise * x for x in _times(self._head, state)]
            own[token % (self.vocabulary - 1) + 1] += 4.0  # its usual successor
            logits.append(own)
        return logits


def _dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _times(matrix: list[Vector], vector: Vector) -> Vector:
    return [_dot(row, vector) for row in matrix]
