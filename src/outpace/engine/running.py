"""The batch of an engine: how sequences join it, share a forward and leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter

import torch
from torch import Tensor

from outpace.cache import Cache, Slot
from outpace.core import RanksLost, StoppedBy, out_of_memory
from outpace.engine.active import Active, Drafting, Stage, by_drafter, fail
from outpace.engine.memory import Memory
from outpace.engine.observer import Observer
from outpace.engine.scheduler import Scheduler
from outpace.engine.slow import tell
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch, Building
from outpace.targets.rows import Output, Rows
from outpace.transfer import finish, last_device

_LONG = 512  # tokens of a text that a drafter first looks at between steps, as they allow


class RunningBatch:
    """The sequences that an engine decodes together, and those that wait to join them.

    Args:
        target, observer, clock: the engine's.
        memory: the cache for their rows, and the prefixes that they share.
        scheduler: decides who joins, how much of a prompt is fed, and who is preempted.
        draftings: the engine's drafters, by the names that requests use.
        layers: the target's layers whose hidden states the drafters and the observer read.

    Attributes:
        leaving: called with each sequence that leaves the batch, the cache and its slot, while its rows are
            still there.
    """

    def __init__(
        self,
        target: TargetModel,
        memory: Memory,
        scheduler: Scheduler,
        draftings: Mapping[str | None, Drafting],
        layers: tuple[int, ...],
        observer: Observer | None,
        clock: Callable[[], float],
    ) -> None:
        self.memory = memory
        self.scheduler = scheduler
        self._target = target
        self._draftings = draftings
        self._layers = layers
        self._observer = observer
        self._clock = clock
        self._last = last_device(target.model)
        self.leaving: Callable[[Sequence, Cache, Slot], None] | None = None
        if layers and memory.prefixes is not None:
            tell(
                "prompts are fed whole, without the prefix cache, since a drafter or an observer reads the "
                "states of each row; where prompts share much, name another drafter, as suffix"
            )

    @property
    def cache(self) -> Cache:
        return self.memory.cache

    @property
    def active(self) -> list[Active]:
        return self.scheduler.active

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences in the batch, and those waiting to join."""
        return [active.sequence for active in self.active] + self.scheduler.waiting

    # -- joining -----------------------------------------------------------------------------------------

    def join(self) -> None:
        """Admit sequences, and feed a chunk of their prompts, or leave it to the step (``Active.chunk``).

        If that has a prompt's last rows, the sequence is ready: its root follows them in the same forward.
        """
        if not self.scheduler.joining:
            return
        began = self._clock()
        self._admit()
        self.leave([a.sequence for a in self.active if a.sequence.error is not None])
        chunk = self.scheduler.chunks(self.cache, self.memory.prefixes is not None)
        self._prefill({a: rows for a, rows in chunk.items() if rows})
        self._start()
        seconds = self._clock() - began
        for active in chunk:
            active.sequence.stats.seconds_prefill += seconds
        self.leave([a.sequence for a in self.active if a.sequence.error is not None])

    def _admit(self) -> None:
        """Admit sequences; where rows are copied or written for them, no more than there is time for."""
        allowance = self.scheduler.allowance
        plain = self.memory.prefixes is None and not self._target.has_encoder
        admitted = self.scheduler.admit(self.cache, self._draftings)
        while plain or allowance.open:
            with allowance.piece():
                active = next(admitted, None)
                if active is None:
                    break
                if not self._layers:
                    try:
                        self.memory.fill(active.slot, active.sequence)
                    except Exception as error:
                        fail([active], error)

    def _rows_left(self, active: Active) -> int:
        """The number of a sequence's rows that remain to be fed before its root."""
        return len(active.sequence.tokens) - 1 - self.cache.length(active.slot)

    def _prefill(self, chunk: Mapping[Active, int]) -> None:
        """Feed the next rows of prompts, as many as ``chunk`` states for each."""
        if not chunk:
            return
        began = self._clock()
        building = Building()
        for active, rows in chunk.items():
            self.add_chunk(building, active, rows)
        output = self.forward(building.made(), list(chunk))
        if output is None:
            return
        fed = {a: chunk[a] for a in chunk if a.sequence.error is None}
        self.cache.keep({a.slot: range(rows) for a, rows in fed.items()})
        self._take(fed, output)
        finish(self._target.device, self._last)
        seconds = self._clock() - began
        self.scheduler.pace.measured(0, 0, sum(fed.values()), seconds)
        self.scheduler.allowance.spend(seconds)

    def add_chunk(self, building: Building, active: Active, rows: int) -> None:
        """Add a number of next rows before a sequence's root, of which none is read."""
        start = self.cache.length(active.slot)
        # The prompt's last token is fed in a step, and so were emitted tokens that are fed again.
        prompt = min(max(active.sequence.prompt_length - 1 - start, 0), rows)
        building.add(active.slot, Rows(active.sequence.tokens[start : start + rows]), rows, prompt)

    def read_ahead(self, output: Output) -> None:
        """Pass on the hidden states of the rows of prompts that a step's forward has fed before roots."""
        if self._layers:
            joined = [a for a in self.active if a.ahead and a.ready and a.sequence.error is None]
            for active in joined:
                active.hidden.append(output.hidden_of(active.slot, 0, active.ahead))
            self._read(joined)

    def fed(self, rows: Mapping[Active, int], output: Output) -> None:
        """Take the rows of prompts that a step's forward has fed and the cache has kept.

        Args:
            rows: their number by sequence.
        """
        for active in rows:
            active.chunk = None
        self._take(rows, output)
        self._start()

    def _take(self, fed: Mapping[Active, int], output: Output) -> None:
        """Take the hidden states of rows of prompts; store prompts of which there are all rows."""
        for active, rows in fed.items():
            if self._layers and not active.ready:
                active.hidden.append(output.hidden_of(active.slot, 0, rows))
            if self.cache.state_bytes or not self._rows_left(active):
                try:
                    self.memory.keep(active.slot, active.sequence)
                except Exception as error:
                    fail([active], error)

    def _start(self) -> None:
        """Start the drafter and the observer for sequences whose prompts are in the cache.

        If the step's forward feeds their last rows, and hidden states are read, these are passed on after it.
        """
        fed = [a for a in self.active if not a.ready and self._rows_left(a) == a.ahead]
        joined = [active for active in fed if self._starts(active)]
        self._read([a for a in joined if not (self._layers and a.ahead)])

    def _starts(self, active: Active) -> bool:
        """Start the drafter for a sequence; False if that goes on later, beside the steps of others.

        The sequence is then fed as if this were not its prompt's end.
        """
        allowance, drafting = self.scheduler.allowance, active.drafting
        waits = len(active.sequence.tokens) > _LONG and any(other.ready for other in self.active)
        while not active.ready and (allowance.open or not waits):
            with allowance.piece():
                try:
                    if not active.started:
                        active.state = drafting.drafter.start(active.sequence, drafting.shared)
                        active.stage, caught_up = Stage.STARTED, not (waits and drafting.drafts)
                    else:
                        caught_up = drafting.drafter.catch_up(active.state)
                except Exception as error:
                    fail([active], error)
                    return False
            if caught_up:
                active.stage = Stage.READY
        return active.ready

    def _read(self, joined: Seq[Active]) -> None:
        """Pass the hidden states of prompts to the drafter and the observer."""
        hidden: dict[Active, dict[int, Tensor]] = {}
        for active in joined:
            if active.hidden:
                pieces, active.hidden = active.hidden, []
                hidden[active] = {
                    layer: torch.cat([rows[layer] for rows in pieces]) for layer in self._layers
                }
        read = [active for active in joined if active in hidden]
        for drafting, members in by_drafter(read).items():
            try:
                drafting.drafter.read([a.state for a in members], [hidden[a] for a in members])
            except Exception as error:
                fail(members, error)
        if self._observer is not None:
            for active in joined:
                active.stage = Stage.OBSERVED
                self._observer.joined(active.sequence, hidden.get(active, {}))

    def warm(self) -> None:
        """Prepare the target and the drafters, with no sequence in the batch."""
        slots, _ = self.memory.room
        self._target.warm(self.cache, slots, self._layers)
        for drafting in self._draftings.values():
            drafting.drafter.warm(drafting.shared, slots)

    # -- a forward ---------------------------------------------------------------------------------------

    def forward(self, batch: Batch, members: Seq[Active]) -> Output | None:
        """Run a forward of the target for these sequences; return None if none of them is left.

        An error ends the sequences in it; if memory ran out, only the newest one, and the forward is repeated
        for the others.
        """
        while batch.slots:
            try:
                return self._target.forward(self.cache, batch, self._layers)
            except RanksLost:
                raise
            except Exception as error:
                full = out_of_memory(error)
                if full:
                    error.__traceback__ = None  # its frames keep the forward's tensors alive
                failed = [max(members, key=attrgetter("number"))] if full else list(members)
                fail(failed, error)
                self.leave([a.sequence for a in failed])
                members = [active for active in members if active not in failed]
                batch, _ = batch.select([active.slot for active in members])
        return None

    # -- leaving -----------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Reserve rows for the roots; sequences of the lowest rank are preempted if there are too few."""
        self.scheduler.make_room(self.cache, self.release)

    def leave(self, sequences: Seq[Sequence]) -> None:
        """Remove sequences, ended or not; no effect on those that are not here."""
        for sequence in sequences:
            active = next((a for a in self.active if a.sequence is sequence), None)
            if active is None and not self.scheduler.forget(sequence):
                continue
            if sequence.finish_reason is None:
                sequence.stopped_by = StoppedBy("removed")
            if active is not None:
                if self.leaving is not None:
                    self.leaving(sequence, self.cache, active.slot)
                self.release(active)

    def release(self, active: Active) -> None:
        """Remove a sequence from the batch, and release its slot and its drafter's state."""
        sequence = active.sequence
        try:
            if active.started and sequence.error is None:
                self.memory.keep(active.slot, sequence)
            self.cache.free(active.slot)
            if active.started:
                active.drafting.drafter.stop(active.state)
        except Exception as error:
            fail([active], error)
        self.scheduler.doubt |= active.doubt
        self._left(active)
        self.active.remove(active)

    def _left(self, active: Active) -> None:
        if active.stage in (Stage.OBSERVED, Stage.LEAVING) and self._observer is not None:
            active.stage = Stage.LEAVING if active.stage is Stage.OBSERVED else Stage.GONE
            self._observer.left(active.sequence)
        active.stage = Stage.GONE
        active.sequence.place = None

    @property
    def in_doubt(self) -> bool:
        """True if cache or drafters may be in disorder, and no sequence is left that needs them."""
        return self.scheduler.doubt and not self.active

    def end(self) -> None:
        """End every sequence after an exception that may have left anything half done.

        Slots and the states of drafters are not freed: they may be in disorder, and are made anew.
        """
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.stopped_by = StoppedBy("removed")
        for active in self.active:
            self._left(active)
        self.scheduler.clear()
