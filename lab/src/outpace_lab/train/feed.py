"""The batches of a run: which rows each forward reads, whose text, and which places count."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from outpace.draws.noise import key
from outpace_lab.train.boosting import all_layers, still_wrong
from outpace_lab.train.data import Document
from outpace_lab.train.on_policy import is_on_policy, own_text
from outpace_lab.train.reading import read_batch
from outpace_lab.train.states import KeptStates
from outpace_lab.train.trained import Trained, TrainingBatch

Row = Seq[Document]


@dataclass(frozen=True)
class Feed:
    """The batches of a run.

    Each depends on the number of its forward alone, and on the weights if the module writes its text.

    Attributes:
        module: bound to its target.
        rows: all packed rows.
        together: rows per forward, in each process.
        seed: of the order of the rows, and of text written by the module.
        on_policy: the fraction of forwards, in [0, 1], that read text written by the module.
        earlier: drafters; only their mistakes are learnt.
        kept: where the states of unchanged rows are kept.
        process, processes: the index of this process and the number of processes.
    """

    module: Trained
    rows: Seq[Row]
    together: int
    seed: int
    on_policy: float = 0.0
    earlier: Seq[Trained] = ()
    process: int = 0
    processes: int = 1
    kept: KeptStates | None = None
    _order: _Order = field(init=False)

    def __post_init__(self) -> None:
        order = _Order(len(self.rows), self.together * self.processes, self.seed)
        object.__setattr__(self, "_order", order)

    def batch(self, forward: int) -> TrainingBatch:
        """This process's share of a forward; forwards are numbered from 0."""
        places = self._order.places(forward)[self.process :: self.processes]
        rows: Seq[Row] = [self.rows[place] for place in places]
        sampled = is_on_policy(forward, self.on_policy)
        if sampled:
            rows = own_text(self.module, rows, key(self.seed, forward, self.process))
        batch = replace(self._read(rows, None if sampled else self.kept), sampled=sampled)
        return still_wrong(batch, self.earlier) if self.earlier else batch

    def each(self, rows: Seq[Row]) -> Iterator[TrainingBatch]:
        """Unchanged rows in order, with all places counted."""
        for start in range(0, len(rows), self.together):
            yield self._read(rows[start : start + self.together], self.kept)

    def _read(self, rows: Seq[Row], kept: KeptStates | None) -> TrainingBatch:
        return read_batch(self.module.target, rows, all_layers([self.module, *self.earlier]), kept)


class _Order:
    """The order in which forwards read the rows: a new permutation in each epoch."""

    def __init__(self, rows: int, together: int, seed: int) -> None:
        self._rows = rows
        self._together = together
        self._seed = seed
        self._epoch: tuple[int, list[int]] = (-1, [])

    def places(self, forward: int) -> list[int]:
        return [self._place(at) for at in range(forward * self._together, (forward + 1) * self._together)]

    def _place(self, at: int) -> int:
        epoch, place = divmod(at, self._rows)
        if self._epoch[0] != epoch:
            random = torch.Generator().manual_seed(key(self._seed, epoch) % 2**63)
            self._epoch = epoch, torch.randperm(self._rows, generator=random).tolist()
        return self._epoch[1][place]
