"""What decoding has shown of a target, kept to learn from: stretches of text, and the logits where a draft
failed.

A forward that verifies a draft computes the target's distribution at every node it reaches, so what a drafter
got wrong and what would have been right cost nothing to know (Liu et al. 2023, Online Speculative Decoding,
arXiv 2310.07177).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.learned.learned import Batch
from outpace.sequence import Step


@dataclass(frozen=True, eq=False)
class Record:
    """A stretch of a request's text, in main memory.

    Attributes:
        tokens: n of them.
        context: the first so many are the prompt's, or were learnt with the stretch before.
        places: where the target's logits are known, ascending.
        logits: [len(places), vocabulary], each of the token after its place.
        hidden: layer -> [at least n - 1, size], the target's states from the first place on.
    """

    tokens: tuple[int, ...]
    context: int
    places: tuple[int, ...]
    logits: Tensor
    hidden: Mapping[int, Tensor]


class Recording:
    """A record that is being written, while its request is decoded.

    Args:
        tokens: the request's so far; the last ``length // 2`` are kept.
        hidden: layer -> [len(tokens) - 1, size], of all of them but the last.
        length: tokens after which a record ends; the next begins with half as many of them as its context.
        everywhere: logits are kept of every place, not only where a draft failed.
    """

    def __init__(self, tokens: Seq[int], hidden: Mapping[int, Tensor], length: int, everywhere: bool) -> None:
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
        # Cloned, or a view would keep all of it.
        self._hidden = {layer: [rows[first:].clone()] for layer, rows in hidden.items()}

    def add(self, step: Step, layers: Seq[int]) -> Record | None:
        """Take in a step; the record, where it is full."""
        root = len(self._tokens) - 1
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
        """What there is."""
        return Record(
            tuple(self._tokens),
            self._context,
            tuple(self._places),
            torch.cat(self._logits) if self._logits else torch.empty(0, 0),
            {layer: torch.cat(parts) for layer, parts in self._hidden.items()},
        )


def _failed(step: Step) -> int:
    """1 where the target's token at the end of the path was not drafted, although there was a draft to go on
    with, or none at all; else 0: the draft had come to its end, or the text.
    """
    if len(step.tokens) == len(step.path):
        return 0
    guesses = step.draft.guesses
    end = step.path[-1] if step.path else -1
    return int(not len(guesses) or end in guesses.parents)


class Buffer:
    """The newest records; the oldest go where there are more tokens than it may hold.

    Args:
        tokens: how many it may hold.
        held_back: one record of so many is never learnt from, but measured on; at least 2.
        measured: tokens of the target's own to measure on.
    """

    def __init__(self, tokens: int, held_back: int, measured: int) -> None:
        self._limit = tokens
        self._held_back = held_back
        self._measured = measured
        self._records: deque[tuple[bool, Record]] = deque()
        self._added = 0
        self.tokens = 0

    def add(self, record: Record) -> None:
        """Take a record in; one without any text of the target's is left out."""
        if len(record.tokens) <= record.context:
            return
        self._added += 1
        self._records.append((self._added % self._held_back == 0, record))
        self.tokens += len(record.tokens)
        while self.tokens > self._limit:
            self.tokens -= len(self._records.popleft()[1].tokens)

    @property
    def learnt(self) -> list[Record]:
        """Those to learn from, the oldest first."""
        return [record for held, record in self._records if not held and record.places]

    @property
    def held_back(self) -> list[Record]:
        """Those to measure on: the newest of those held back; none where they are too short to tell."""
        found: list[Record] = []
        tokens = 0
        for held, record in reversed(self._records):
            if held and tokens < self._measured:
                found.append(record)
                tokens += len(record.tokens) - record.context
        return found if tokens >= self._measured else []


def batch_of(
    records: Seq[Record], layers: Seq[int], vocabulary: int, device: torch.device, learn: bool
) -> Batch:
    """Records as a batch, one to a row.

    Args:
        learn: the tokens that count are those whose logits are known; else all but the context, and there
            are no logits (zeros stand for them): to measure acceptance on.
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
    return Batch(
        tokens=tokens.to(device),
        positions=torch.arange(width, device=device).expand(size),
        documents=documents.to(device),
        counted=counted.to(device),
        hidden={layer: _stacked(records, layer, width).to(device) for layer in layers},
        logits=logits.to(device) if learn else torch.zeros(1, device=device).expand(*size, vocabulary),
    )


def _stacked(records: Seq[Record], layer: int, width: int) -> Tensor:
    """[B, width, size]; zeros where there is no row."""
    some = records[0].hidden[layer]
    stacked = torch.zeros(len(records), width, some.shape[-1], dtype=some.dtype)
    for row, record in enumerate(records):
        rows = record.hidden[layer][: len(record.tokens)]
        stacked[row, : len(rows)] = rows
    return stacked
