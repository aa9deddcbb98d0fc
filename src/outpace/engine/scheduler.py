"""Scheduling of the batch: requests that wait for memory, prompts fed in chunks, and preemption."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from torch import Tensor

from outpace.cache import Cache, CacheFull, Place, Slot
from outpace.core import OutpaceError
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel

_PASSED = 8  # maximum number of later requests that may join before a waiting one
_ANSWER, _DRAFT = 256, 64  # rows reserved at first: for the answer at most, and for drafts
_LEAST = 16  # minimum number of rows of a chunk
_REMEMBERED = 16  # forwards from whose seconds the size of a chunk is computed


@dataclass(eq=False)
class Active:
    """A sequence in the batch, with its rows in the cache and the drafter's state.

    Attributes:
        number: sequence number of its arrival.
        drafting: the ``Drafting`` that drafts for it.
        hidden: the target's hidden states of its prompt, in pieces as they were fed, for drafters that read
            them.
        ready: whether its prompt is in the cache, except for the rows that the next step feeds.
        started: whether the drafter has a state for it.
        observed: whether the observer knows of it.
        doubt: whether an error of its own may have left the cache or the drafter in disorder.
    """

    sequence: Sequence
    slot: Slot
    number: int
    drafting: Any = None
    hidden: list[dict[int, Tensor]] = field(default_factory=list)
    ready: bool = False
    state: Any = None
    started: bool = False
    observed: bool = False
    doubt: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of preemption, the lowest first: by priority, then the newest first."""
        return self.sequence.priority, -self.number


@dataclass
class _Waiting:
    """A waiting request, and the number of later ones that joined before it."""

    sequence: Sequence
    number: int
    passed: int = 0

    @property
    def turn(self) -> tuple[bool, int, int]:
        """Sort key of admission, the lowest first."""
        late = self.passed >= _PASSED
        return not late, 0 if late else -self.sequence.priority, self.number


class Scheduler:
    """Scheduler that admits requests while the cache has rows for them, and chooses which to preempt.

    A request joins if the cache can reserve rows for its prompt, its answer (256 tokens of it at first) and a
    draft. Higher priorities join first, equal ones in the order of arrival. If a request does not fit, up to
    8 later ones that fit join before it. A sequence that outgrows its rows takes them from the newest
    sequence of the lowest priority, which is preempted: it waits again and is later resumed from its tokens.

    Args:
        prefill_chunk: maximum number of rows of a chunk.
        most: maximum number of sequences in the batch; None for no limit.

    Attributes:
        doubt: whether an error, perhaps that of a signal's handler, may have left the cache or a drafter in
            disorder; they are then replaced as soon as no sequence is in the batch.
    """

    def __init__(self, target: TargetModel, prefill_chunk: int, most: int | None = None) -> None:
        self.active: list[Active] = []
        self.doubt = False
        self.pace = Pace(prefill_chunk)
        self._target = target
        self._most = most
        self._waiting: dict[Sequence, _Waiting] = {}
        self._numbers = itertools.count()

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    @property
    def ready(self) -> list[Active]:
        return [active for active in self.active if active.ready]

    @property
    def joining(self) -> bool:
        """True if a sequence is waiting, or has rows of its prompt to feed."""
        return bool(self._waiting) or not all(active.ready for active in self.active)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the queue, unless it has ended."""
        if sequence.finish_reason is None:
            self._waiting[sequence] = _Waiting(sequence, next(self._numbers))

    def forget(self, sequence: Sequence) -> bool:
        """Remove a sequence from the queue; return False if it is not in it."""
        return self._waiting.pop(sequence, None) is not None

    def clear(self) -> None:
        """Remove all sequences, in the batch or waiting."""
        self.active.clear()
        self._waiting.clear()

    def admit(self, cache: Cache) -> list[Active]:
        """Admit sequences, each with a slot. One whose slot cannot be opened ends with the error."""
        joined: list[Active] = []
        queue = self._in_turn()
        while queue:
            one = queue.popleft()
            sequence = one.sequence
            try:
                slot = self._open(cache, sequence)
            except Exception as error:
                self.doubt |= not isinstance(error, OutpaceError)
                sequence.fail(error)
                self.forget(sequence)
                continue
            if slot is not None:
                joined.append(Active(sequence, slot, one.number))
                self.active.append(joined[-1])  # before it is forgotten: an interrupt must find it
                self.forget(sequence)
                if self._pass(one.number):
                    queue = self._in_turn()
            elif one.passed >= _PASSED:
                break
        return joined

    def _in_turn(self) -> deque[_Waiting]:
        return deque(sorted(self._waiting.values(), key=attrgetter("turn")))

    def _pass(self, number: int) -> bool:
        """Count a request that joined before earlier ones; return True if one of those must join next."""
        passed = [one for one in self._waiting.values() if one.number < number]
        for one in passed:
            one.passed += 1
        return any(one.passed == _PASSED for one in passed)

    def _open(self, cache: Cache, sequence: Sequence) -> Slot | None:
        """Allocate a slot with room for a sequence; None if there is too little room now."""
        if any(most is not None and len(cache) >= most for most in (cache.max_slots, self._most)):
            return None
        rows = len(sequence.tokens) + min(sequence.room, _ANSWER) + _DRAFT
        most = min(filter(None, (cache.max_length, cache.capacity)), default=rows)
        try:
            slot = self._target.open(cache, sequence.source, min(rows, most))
        except CacheFull:
            return None
        sequence.place = Place(cache, slot)
        return slot

    def chunk(self, cache: Cache) -> tuple[dict[Active, int], dict[Active, int]]:
        """Choose the rows of prompts to feed now: in a forward of their own, and in the step's.

        While other sequences are decoding, prompts share a chunk that ``Pace`` allows; otherwise each feeds a
        full one. It rides in the step's forward if the target mixes rows, otherwise it has its own. If none
        is decoding, the last rows of all prompts ride with their roots, which saves a forward: those of every
        prompt if the target mixes rows, otherwise the same number of each. Where rows of prompts differ from
        those of steps, none ride.

        Returns:
            The number of rows of each prompt in a forward of their own, and in the step's.
        """
        reading = sorted((a for a in self.active if not a.ready), key=lambda a: a.rank, reverse=True)
        if not reading:
            return {}, {}
        behind = {a: len(a.sequence.tokens) - 1 - cache.length(a.slot) for a in reading}
        mixes, decoding = len(self.active) > 1 and self._target.mixes, len(self.active) - len(reading)
        if decoding:
            rows = self.pace.rows(decoding, len(reading) if mixes else 0)
            return ({}, _shared(behind, rows)) if mixes else (_shared(behind, rows), {})
        most = self.pace.most
        chunk = {a: min(rows, most) for a, rows in behind.items()}
        if self._target.prompts_differ:
            return chunk, {}
        if mixes and any(chunk[a] == rows for a, rows in behind.items()):
            return {}, chunk
        ahead = min(chunk.values())
        if all(rows - ahead <= most for rows in behind.values()):
            riding = dict.fromkeys(behind, ahead) if ahead else {}
            return {a: rows - ahead for a, rows in behind.items()}, riding
        return chunk, {}

    def make_room(self, cache: Cache, release: Callable[[Active], None]) -> None:
        """Reserve a row for each root, and preempt the lowest-ranked sequences if there are too few rows.

        Args:
            release: removes a sequence from the batch and frees its rows.
        """
        short = [a for a in self.ready if len(a.sequence.tokens) > cache.room(a.slot)]
        for active in sorted(short, key=lambda a: a.rank, reverse=True):
            rows = len(active.sequence.tokens)
            while active in self.active and rows > cache.room(active.slot):
                try:
                    cache.reserve(active.slot, rows)
                    break  # some caches allocate only when rows are written
                except CacheFull:
                    last = min(self.active, key=lambda a: a.rank)
                    # It waits before it is released: an interrupt must find it.
                    self._waiting[last.sequence] = _Waiting(last.sequence, last.number)
                    release(last)


def _shared(behind: Mapping[Active, int], rows: int) -> dict[Active, int]:
    """Share a chunk among prompts: half goes to the first, the rest to those with the fewest rows left."""
    first, *others = behind
    shares = {first: min(behind[first], rows // 2 if others else rows)}
    for active in [*sorted(others, key=behind.__getitem__), first]:
        left = rows - sum(shares.values())
        shares[active] = min(behind[active], shares.get(active, 0) + left)
    return {active: share for active, share in shares.items() if share}


class Pace:
    """Number of a prompt's rows that cost about half a decode step, from measurements.

    The seconds of a forward are taken as a constant, plus a price per row that is decoded, plus one per row
    of a prompt.

    Args:
        most: maximum number of rows of a chunk, used as is when no sequence is decoding.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # The latest forwards without and with rows of prompts: decoding rows, rows of prompts, seconds.
        self._forwards = [deque[tuple[int, int, float]](maxlen=_REMEMBERED) for _ in range(2)]
        self._width = 1.0  # rows per decoding sequence in the latest step
        self._prices: list[float] | None = None  # the constant, of a decoding row, and of a row of a prompt

    def measured(self, decoding: int, drafted: int, prompts: int, seconds: float) -> None:
        """Take the measurement of a forward.

        Args:
            decoding: number of decoding sequences.
            drafted: their rows, roots and drafts.
            prompts: number of rows of prompts.
        """
        self._forwards[prompts > 0].append((drafted, prompts, seconds))
        if decoding:
            self._width = drafted / decoding
        if prompts or self._prices is None:
            self._fit()

    def _fit(self) -> None:
        if all(self._forwards):
            found = np.array([one for forwards in self._forwards for one in forwards])
            inputs = np.column_stack([np.ones(len(found)), found[:, :2]])
            self._prices = np.linalg.lstsq(inputs, found[:, 2], rcond=None)[0].tolist()

    @property
    def row_seconds(self) -> float | None:
        """Seconds of a further row of a prompt in a forward; None before it was measured."""
        return None if self._prices is None or self._prices[2] <= 0 else self._prices[2]

    def without(self, prompts: int, seconds: float) -> float | None:
        """Seconds of a forward without its rows of prompts; None if they took most of them, or too unsure."""
        price = self.row_seconds if prompts else 0.0
        return None if price is None or 2 * price * prompts > seconds else seconds - price * prompts

    def rows(self, decoding: int, joining: int = 0) -> int:
        """Rows of the next chunk.

        A chunk alone takes half the time of a step. With a chunk in it, a step takes one and a half times
        that of a step in which the joining sequences decode too: so it is the larger, the more of them wait.

        Args:
            decoding: number of sequences that are decoding.
            joining: number of sequences whose prompts ride in the step; 0 if they have their own forward.
        """
        least = min(_LEAST, self.most)
        self._fit()
        if self._prices is None:
            return least
        constant, drafted, prompt = self._prices
        sequence = drafted * self._width
        spare = (constant + sequence * decoding) / 2 + 1.5 * sequence * joining
        found = self.most if prompt <= 0 else int(spare / prompt)
        tried = max(rows for _, rows, _ in self._forwards[True])
        return max(least, min(found, 2 * tried, self.most))  # no more than twice what was measured
