"""Scheduling of the batch: requests that wait for memory, prompts fed in chunks, and preemption."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from outpace.cache import Cache, CacheFull, Place, Slot
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel

_PASSED = 8  # maximum number of later requests that may join before a waiting one
_ANSWER, _DRAFT = 256, 64  # rows reserved at first: for the answer at most, and for drafts
_LEAST = 16  # minimum number of rows of a chunk
_WEIGHT = 0.3  # weight of the latest measurement in a moving average


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
    """

    sequence: Sequence
    slot: Slot
    number: int
    drafting: Any = None
    hidden: list[dict[int, Tensor]] = field(default_factory=list)
    ready: bool = False
    state: Any = None
    started: bool = False

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
    """

    def __init__(self, target: TargetModel, prefill_chunk: int, most: int | None = None) -> None:
        self.active: list[Active] = []
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
                sequence.fail(error)
                self.forget(sequence)
                continue
            if slot is not None:
                self.forget(sequence)
                joined.append(Active(sequence, slot, one.number))
                if self._pass(one.number):
                    queue = self._in_turn()
            elif one.passed >= _PASSED:
                break
        self.active += joined
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

    def chunk(self, cache: Cache, rides: bool) -> tuple[dict[Active, int], int]:
        """Choose the rows of prompts to feed now, in one forward.

        While other sequences are decoding, a chunk costs about half a decode step, and prompts share it;
        otherwise each prompt feeds a full chunk. If none is decoding and the last rows of all prompts, equal
        in number, fit into the first step's forward, they are left to that step, which saves a forward.

        Args:
            rides: whether a step's forward may include rows of a prompt.

        Returns:
            The number of rows of each prompt, and the number per prompt that is left to the step.
        """
        reading = sorted((a for a in self.active if not a.ready), key=lambda a: a.rank, reverse=True)
        behind = {a: len(a.sequence.tokens) - 1 - cache.length(a.slot) for a in reading}
        if len(reading) < len(self.active):
            rows = self.pace.rows()
            shared = reading[: max(1, rows // _LEAST)]
            return {a: min(behind[a], rows // len(shared)) for a in shared}, 0
        most = self.pace.most
        ahead = min([most, *behind.values()]) if rides else 0
        if all(rows - ahead <= most for rows in behind.values()):
            return {a: rows - ahead for a, rows in behind.items()}, ahead
        return {a: min(rows, most) for a, rows in behind.items()}, 0

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
                    release(last)
                    self._waiting[last.sequence] = _Waiting(last.sequence, last.number)


class Pace:
    """Number of a prompt's rows that cost about half a decode step, from measurements.

    Args:
        most: maximum number of rows of a chunk, used as is when no sequence is decoding.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._step: tuple[float, float] | None = None  # mean rows and seconds of a decode forward
        self._chunk: tuple[float, float] | None = None

    def stepped(self, rows: int, seconds: float) -> None:
        self._step = _mean(self._step, rows, seconds)

    def chunked(self, rows: int, seconds: float) -> None:
        self._chunk = _mean(self._chunk, rows, seconds)

    @property
    def row_seconds(self) -> float | None:
        """Seconds of a further row in a wide forward; None before a chunk wider than a step was measured."""
        if self._step is None or self._chunk is None or self._chunk[0] <= self._step[0]:
            return None
        (rows, seconds), (wide, longer) = self._step, self._chunk
        return (longer - seconds) / (wide - rows)

    def rows(self) -> int:
        """Rows of the next chunk: half a step's seconds divided by the seconds per further row."""
        least = min(_LEAST, self.most)
        if self._step is None or self._chunk is None:
            return least
        (_, seconds), (wide, longer) = self._step, self._chunk
        slope = self.row_seconds
        if slope is None:
            slope = longer / wide
        found = self.most if slope <= 0 else int(seconds / 2 / slope)
        return max(least, min(found, 2 * int(wide), self.most))  # no more than twice what was measured


def _mean(mean: tuple[float, float] | None, rows: float, seconds: float) -> tuple[float, float]:
    if mean is None:
        return rows, seconds
    return mean[0] + _WEIGHT * (rows - mean[0]), mean[1] + _WEIGHT * (seconds - mean[1])
