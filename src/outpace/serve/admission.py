"""Admission to a server: how many choices are let in, and how long they wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outpace.serve.errors import Refused, later
from outpace.serve.metrics import Metrics
from outpace.serve.totals import CLIENT, Total

_SHARE = 16  # of all choices, the part that a client may have in any case
_RECENT = 64  # number of recent ends of choices from which the rate is measured


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        running: maximum number of sequences decoded at once.
        waiting: maximum number of further choices that wait; beyond it, requests are refused with 429.
        wait: maximum seconds that a choice waits to join the batch.
        unread: maximum number of tokens by which a client may lag.
        body: maximum bytes of a request's body.
        head, receive: maximum seconds for the head of a request to arrive, and for its body.
        read: maximum seconds for a prompt to be put into its template and tokenised.
        stuck: maximum seconds for the engine's thread to answer; then the server is not healthy.
        ping: seconds between pings in a silent stream.
        send: maximum seconds for a client to accept a chunk.
        cut: an answer's limit beyond the context is cut to what is left; otherwise the request is refused.
        lenient: unknown fields of a body are ignored, and named in a header; otherwise they are refused.
    """

    running: int = 32
    waiting: int = 256
    wait: float = 60.0
    unread: int = 4096
    body: int = 4 * 2**20
    head: float = 10.0
    receive: float = 60.0
    read: float = 10.0
    stuck: float = 60.0
    ping: float = 15.0
    send: float = 30.0
    cut: bool = True
    lenient: bool = False

    @property
    def choices(self) -> int:
        """Maximum number of choices, running and waiting."""
        return self.running + self.waiting

    @property
    def connections(self) -> int:
        """Maximum number of connections: one per choice, and some for other requests."""
        return self.choices + 224

    @property
    def bodies(self) -> int:
        """Maximum bytes of the bodies of all requests that are read at a time."""
        return 32 * self.body


class Ticket:
    """Reserved room for choices, from before their prompts are tokenised until they have ended."""

    def __init__(self, admission: Admission, choices: int) -> None:
        self._admission = admission
        self._choices, self._client = choices, CLIENT.get()
        self._work: asyncio.Future[Any] | None = None

    def hold(self, work: asyncio.Future[Any]) -> None:
        """Keep the room until this work has ended, though the ticket be closed before."""
        self._work = work

    def close(self) -> None:
        """Release the room; repeated calls have no effect."""
        if self._work is not None and not self._work.done():
            self._work.add_done_callback(lambda _: self.close())
            return
        self._admission.leave(self._client, self._choices)
        self._choices = 0


def choices_in(limits: Limits) -> Total:
    """The room for choices of a whole server."""
    return Total(limits.choices, max(1, limits.choices // _SHARE))


class Admission:
    """Room for choices, of which a ticket reserves some.

    Args:
        clock: function that returns the time in seconds.
        total: the choices that hold a ticket of any model's in this process; None for one model alone.

    Attributes:
        total: the choices that hold a ticket, by their clients.
        inside: number of choices that hold a ticket of this model's.
        empty: set while there are none.
        emptied: the time since when there are none.
    """

    def __init__(
        self, limits: Limits, metrics: Metrics, clock: Callable[[], float], total: Total | None = None
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.total = total or choices_in(limits)
        self.inside, self.emptied = 0, clock()
        self.empty = asyncio.Event()
        self.empty.set()
        self._metrics = metrics
        self._ends: deque[float] = deque(maxlen=_RECENT)

    def admit(self, choices: int) -> Ticket:
        """Reserve room for choices.

        Raises:
            Refused: there is no room.
        """
        most = self.limits.choices
        if choices > most:
            raise Refused(400, f"{choices} choices exceed the maximum of {most}", "n")
        if not self.total.take(CLIENT.get(), choices):
            self._metrics.refused("overload")
            message = f"the server is full: {self.total.all} of {most} choices are running or waiting"
            raise later(429, message, "overloaded", self.seconds_for(choices))
        self.inside += choices
        self.empty.clear()
        return Ticket(self, choices)

    def leave(self, client: str, choices: int) -> None:
        """Release the room of a ticket."""
        self.total.give(client, choices)
        self.inside -= choices
        if not self.inside and not self.empty.is_set():
            self.emptied = self.clock()
            self.empty.set()

    def finished(self) -> None:
        """Record the end of a choice, for the rate."""
        self._ends.append(self.clock())

    def seconds_for(self, choices: int) -> float:
        """Estimated seconds until this number of choices has ended, at the recent rate."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(self._ends[-1] - self._ends[0], 1e-3)
        return min(choices / rate, 60)

    def seconds_left(self, began: float) -> float:
        """Seconds that a choice may still wait to join the batch, if it has waited since ``began``."""
        return max(0.0, began + self.limits.wait - self.clock())

    def waited_too_long(self) -> Refused:
        """Count and return the refusal of a choice that has waited to the end."""
        self._metrics.refused("wait")
        message = f"the request has waited for more than {self.limits.wait:g} s; try again later"
        return later(503, message, "waited_too_long", self.seconds_for(1))
