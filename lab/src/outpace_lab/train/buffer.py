"""The buffer of online learning: stretches of decoded text, and the target's logits where a draft failed.

A forward that verifies a draft computes the target's distribution at every node it reaches, so knowing what a
drafter got wrong, and what would have been right, is free (Liu et al. 2023, Online Speculative Decoding,
arXiv 2310.07177).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.sequence import Step
from outpace_lab.train.batch import padded
from outpace_lab.train.trained import TrainingBatch


@dataclass(frozen=True, eq=False)
class Record:
    """A stretch of a request's text, in main memory.

    Attributes:
        tokens: n token ids.
        context: the number of tokens at the start that are the prompt's, or were learnt with the previous
            stretch.
        places: indices at which the target's logits are known, ascending.
        logits: [len(places), vocabulary], each predicting the token after its place.
        hidden: layer -> [at least n - 1, size], the target's hidden states from the first place on.
        source: the tokens of the request's source.
    """

    tokens: tuple[int, ...]
    context: int
    places: tuple[int, ...]
    logits: Tensor
    hidden: Mapping[int, Tensor]
    source: Seq[int] = ()


class Recording:
    """A record being written while its request is decoded.

    Args:
        tokens: the request's tokens so far; the last ``length // 2`` are kept.
        hidden: layer -> [len(tokens) - 1, size], the states of all tokens but the last.
        length: tokens after which a record ends; the next one starts with the last half of them as context.
        everywhere: keep the logits of every place, not only where a draft failed.
        source: the tokens of the request's source.
    """

    def __init__(
        self,
        tokens: Seq[int],
        hidden: Mapping[int, Tensor],
        length: int,
        everywhere: bool,
        source: Seq[int] = (),
    ) -> None:
        self._source = source
        self._length = length
        self._everywhere = everywhere
        self._begin(tokens, {layer: rows.cpu() for layer, rows in hidden.items()})

    def _begin(self, tokens: Seq[int], hidden: Mapping[int, Tensor]) -> None:
        kept = min(len(tokens), self._length // 2)
        first = len(tokens) - kept
        self._tokens = list(tokens[first:])
        self._context = kept
        self._places: list[int] = []
        self._logits: list[Tensor] = []
        # Cloned: a view would keep the whole tensor in memory.
        self._hidden = {layer: [rows[first:].clone()] for layer, rows in hidden.items()}

    def add(self, step: Step, layers: Seq[int]) -> Record | None:
        """Append a step; return the record once it is full."""
        root = len(self._tokens) - 1
        # Node -1 is the root. visited[i] predicted step.tokens[i], the token at index root + i + 1.
        visited = [-1, *step.path][: len(step.tokens)]
        first = 0 if self._everywhere else len(visited) - _failed(step)
        if first < len(visited):
            self._places += range(root + first, root + len(visited))
            self._logits.append(step.logits.gather(visited[first:]).cpu())
        for layer in layers:
            self._hidden.setdefault(layer, []).append(step.committed[layer].cpu())
        self._tokens += step.tokens
        if len(self._tokens) < self._length:
            return None
        whole = self.end()
        rows = len(self._tokens) - 1
        self._begin(self._tokens, {layer: states[:rows] for layer, states in whole.hidden.items()})
        return whole

    def end(self) -> Record:
        """The record of everything added so far."""
        return Record(
            tuple(self._tokens),
            self._context,
            tuple(self._places),
            torch.cat(self._logits) if self._logits else torch.empty(0, 0),
            {layer: torch.cat(parts) for layer, parts in self._hidden.items()},
            self._source,
        )


def _failed(step: Step) -> int:
    """1 if the target's token at the end of the path was not drafted, although the draft continued there or
    was empty; 0 if the draft or the text ended there.
    """
    if len(step.tokens) == len(step.path):
        return 0
    guesses = step.draft.guesses
    end = step.path[-1] if step.path else -1
    return int(not len(guesses) or end in guesses.parents)


class Buffer:
    """The newest records, up to a number of tokens; the oldest are dropped first.

    Args:
        tokens: the capacity.
        held_back: one record in this many is never learnt from but used for measuring; at least 2.
        measured: tokens emitted by the target that a measurement needs.
    """

    def __init__(self, tokens: int, held_back: int, measured: int) -> None:
        self._limit = tokens
        self._held_back = held_back
        self._measured = measured
        self._records: deque[tuple[bool, Record]] = deque()
        self._added = 0
        self.tokens = 0

    def add(self, record: Record) -> None:
        """Append a record; one without any token emitted by the target is ignored."""
        if len(record.tokens) <= record.context:
            return
        self._added += 1
        self._records.append((self._added % self._held_back == 0, record))
        self.tokens += len(record.tokens)
        while self.tokens > self._limit:
            self.tokens -= len(self._records.popleft()[1].tokens)

    @property
    def learnt(self) -> list[Record]:
        """The records to learn from, oldest first."""
        return [record for held, record in self._records if not held and record.places]

    @property
    def held_back(self) -> list[Record]:
        """The records to measure on: the newest of those held back; none if they are too short."""
        found: list[Record] = []
        tokens = 0
        for held, record in reversed(self._records):
            if held and tokens < self._measured:
                found.append(record)
                tokens += len(record.tokens) - record.context
        return found if tokens >= self._measured else []


def batch_of(
    records: Seq[Record], layers: Seq[int], vocabulary: int, device: torch.device, learn: bool
) -> TrainingBatch:
    """Records as a batch, one per row.

    Args:
        learn: count the tokens whose logits are known, for training. Otherwise count all but the context and
            fill the logits with zeros, for measuring acceptance.
    """
    width = max(len(record.tokens) for record in records)
    size = (len(records), width)
    tokens = torch.zeros(size, dtype=torch.long)
    documents = torch.full(size, -1)
    counted = torch.zeros(size, dtype=torch.bool)
    if learn:
        logits = torch.zeros(*size, vocabulary, dtype=records[0].logits.dtype)
    for row, record in enumerate(records):
        length = len(record.tokens)
        tokens[row, :length] = torch.tensor(record.tokens)
        documents[row, :length] = 0
        if learn:
            places = torch.tensor(record.places, dtype=torch.long)
            counted[row, places + 1] = True
            logits[row, places] = record.logits
        else:
            counted[row, record.context : length] = True
    return TrainingBatch(
        tokens=tokens.to(device),
        positions=torch.arange(width, device=device).expand(size),
        documents=documents.to(device),
        counted=counted.to(device),
        hidden={layer: _stacked(records, layer, width).to(device) for layer in layers},
        scores=logits.to(device) if learn else torch.zeros(1, device=device).expand(*size, vocabulary),
        source=padded([record.source for record in records], device),
    )


def _stacked(records: Seq[Record], layer: int, width: int) -> Tensor:
    """One layer's hidden states [B, width, size], padded with zeros."""
    some = records[0].hidden[layer]
    stacked = torch.zeros(len(records), width, some.shape[-1], dtype=some.dtype)
    for row, record in enumerate(records):
        rows = record.hidden[layer][: len(record.tokens)]
        stacked[row, : len(rows)] = rows
    return stacked
