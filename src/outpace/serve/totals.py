"""Totals: what all clients together may hold of something, of which each has a share."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

_CLIENTS = 8  # that have their shares beside those who hold all of the rest
CLIENT = ContextVar("client", default="")  # whose request is handled: a digest of its key, or its address


def network(address: str) -> str:
    """The address of a client, or in IPv6 that of its network: a client has all of the addresses in it."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a socket of the system has none
        return address
    if found.version == 6:
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return address


class Total:
    """Amount of something that clients hold together.

    Any client may hold all of it. Beside it there is a reserve, which is for clients that hold less than a
    share: so one that holds nothing has its share whatever another holds, and none waits for nothing.

    Args:
        most: the amount without the reserve.
        share: the amount that a client may hold in any case.

    Attributes:
        held: the amount that each client holds, by its key or address.
    """

    def __init__(self, most: int, share: int = 1, clients: int = _CLIENTS) -> None:
        self.most, self.share = most, share
        self.reserve = share * clients
        self.held: Counter[str] = Counter()

    @property
    def all(self) -> int:
        return self.held.total()

    def take(self, client: str, amount: int, force: bool = False) -> bool:
        """Give a client more, if it may have it; return whether it may.

        Args:
            force: give it in any case.
        """
        total = self.all + amount
        small = self.held[client] + amount <= self.share and total <= self.most + self.reserve
        if not (total <= self.most or small or force):
            return False
        self.held[client] += amount
        return True

    def give(self, client: str, amount: int) -> None:
        self.held[client] -= amount
        if not self.held[client]:
            del self.held[client]


class Turns:
    """Places for work, taken in turns by clients that wait for them: each has its own queue.

    Args:
        most: number of places, beside one for a client that has none.
    """

    def __init__(self, most: int) -> None:
        self.total = Total(most, clients=1)
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        if self._queues.get(client) or not self.total.take(client, 1):
            await self._turn(client)
        try:
            yield
        finally:
            self._leave(client)

    async def _turn(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(client)
            raise

    def _leave(self, client: str) -> None:
        self.total.give(client, 1)
        for other in list(self._queues):
            queue = self._queues[other]
            while queue and queue[0].cancelled():
                queue.popleft()
            if queue and self.total.take(other, 1):
                queue.popleft().set_result(None)
                self._queues[other] = self._queues.pop(other)  # it is the last one's turn again
            if not queue:
                del self._queues[other]
