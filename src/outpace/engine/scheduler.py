"""Scheduling of the batch: requests that wait for memory, their order, and preemption."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from outpace.cache import Cache, CacheFull, Place, Slot
from outpace.core import OutpaceError
from outpace.engine.active import Active, Drafting
from outpace.engine.chunks import Pace, choose_chunks
from outpace.engine.clock import Allowance
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel

_PASSED = 8  # maximum number of later requests that may join before a waiting one
_ANSWER, _DRAFT = 256, 64  # rows reserved at first: for the answer at most, and for drafts


@dataclass
class _Waiting:
    """A waiting request.

    Attributes:
        round: the round of turns of clients in which it is its client's.
        passed: number of requests after it that joined before it.
    """

    sequence: Sequence
    number: int
    round: int
    passed: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Sort key among requests of equal priority."""
        return self.round, self.number

    @property
    def turn(self) -> tuple[bool, int, tuple[int, int]]:
        """Sort key of admission, the lowest first."""
        late = self.passed >= _PASSED
        return not late, 0 if late else -self.sequence.priority, self.place


class Scheduler:
    """Scheduler that admits requests while the cache has rows for them, and chooses which to preempt.

    A request joins if the cache can reserve rows for its prompt, its answer (256 tokens of it at first) and a
    draft. Higher priorities join first; of equal ones clients take turns, and each client's requests join in
    the order of arrival. If a request does not fit, up to 8 later ones that fit join before it. A sequence
    that outgrows its rows takes them from the newest sequence of the lowest priority, which is preempted: it
    waits again and is later resumed from its tokens.

    Args:
        prefill_chunk: maximum number of rows of a chunk.
        most: maximum number of sequences in the batch; None for no limit.

    Attributes:
        doubt: whether an error, perhaps that of a signal's handler, may have left the cache or a drafter in
            disorder; they are then replaced as soon as no sequence is in the batch.
    """

    def __init__(
        self,
        target: TargetModel,
        prefill_chunk: int,
        most: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.active: list[Active] = []
        self.doubt = False
        self.pace = Pace(prefill_chunk)
        self.allowance = Allowance(clock, lambda: any(active.ready for active in self.active))
        self._target = target
        self._most = most
        self._waiting: dict[Sequence, _Waiting] = {}
        self._numbers = itertools.count()
        self._round = 0  # of the turns of clients

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    @property
    def ready(self) -> list[Active]:
        return [active for active in self.active if active.ready]

    def decoding(self) -> list[Active]:
        """The sequences of the next step: those that are ready, and whose own work has not had its share.

        Without them, nobody waits for it.
        """
        ready = self.ready
        rested = [active for active in ready if active.debt <= 0]
        if not rested:
            for active in ready:
                active.debt = 0.0
        return rested or ready

    def charge(self, own: Mapping[Active, float], seconds: float) -> None:
        """Note the work in a step that was of single sequences, as long as the rest of steps is free."""
        if own or any(active.debt for active in self.active):
            ready = self.ready
            share = max(seconds - sum(own.values()), 0.0) / max(len(ready), 1)
            for active in ready:
                active.debt = max(active.debt + own.get(active, 0.0) - share, 0.0)

    @property
    def joining(self) -> bool:
        """True if a sequence is waiting, or has rows of its prompt to feed."""
        return bool(self._waiting) or not all(active.ready for active in self.active)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the queue, unless it has ended."""
        if sequence.finish_reason is None:
            own = (w.round for w in self._waiting.values() if w.sequence.client == sequence.client)
            after = max(self._round, max(own, default=-1) + 1)
            self._waiting[sequence] = _Waiting(sequence, next(self._numbers), after)

    def forget(self, sequence: Sequence) -> bool:
        """Remove a sequence from the queue; return False if it is not in it."""
        return self._waiting.pop(sequence, None) is not None

    def clear(self) -> None:
        self.active.clear()
        self._waiting.clear()

    def admit(self, cache: Cache, draftings: Mapping[str | None, Drafting]) -> Iterator[Active]:
        """Admit sequences one by one, each with a slot. One whose slot cannot be opened ends with the error.

        Args:
            draftings: what drafts for them, by the names that requests use.
        """
        queue = self._in_turn()
        while queue:
            waiting = queue.popleft()
            sequence = waiting.sequence
            try:
                slot = self._open(cache, sequence)
            except Exception as error:
                self.doubt |= not isinstance(error, OutpaceError)
                sequence.fail(error)
                self.forget(sequence)
                continue
            if slot is not None:
                drafting = draftings[sequence.params.drafts.drafter]
                active = Active(sequence, slot, waiting.number, drafting)
                self.active.append(active)  # before it is forgotten: an interrupt must find it
                self.forget(sequence)
                self._round = max(self._round, waiting.round)
                if self._pass(waiting.place):
                    queue = self._in_turn()
                yield active
            elif waiting.passed >= _PASSED:
                break

    def _in_turn(self) -> deque[_Waiting]:
        return deque(sorted(self._waiting.values(), key=attrgetter("turn")))

    def _pass(self, place: tuple[int, int]) -> bool:
        """Count a request that joined before others; return True if one of those must join next."""
        passed = [waiting for waiting in self._waiting.values() if waiting.place < place]
        for waiting in passed:
            waiting.passed += 1
        return any(waiting.passed == _PASSED for waiting in passed)

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

    def chunks(self, cache: Cache, shared: bool) -> dict[Active, int]:
        """Choose the rows of prompts to feed now; see ``choose_chunks``."""
        step = self._target.prompt_step if self._target.prompts_differ or shared else 1
        mixes = len(self.active) > 1 and self._target.mixes
        return choose_chunks(self.active, cache, self.pace, mixes, self._target.prompts_differ, step)

    def make_room(self, cache: Cache, release: Callable[[Active], None]) -> None:
        """Reserve a row for each root, and preempt the lowest-ranked sequences if there are too few rows."""
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
                    self._waiting[last.sequence] = _Waiting(last.sequence, last.number, 0)
                    release(last)
