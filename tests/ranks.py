"""Ranks that are threads of this process, in place of processes and their connections."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outpace.targets import TargetModel
from outpace.targets.ranks.led import LedTarget, follow
from outpace.targets.ranks.shared_drafts import ParallelTarget

T = TypeVar("T")


class _Room:
    """Data shared by the ranks."""

    def __init__(self, size: int) -> None:
        self.messages: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(size)]
        self.said: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadRanks:
    """One rank."""

    def __init__(self, room: _Room, rank: int, size: int) -> None:
        self.room, self.rank, self.size = room, rank, size
        self.sent = 0

    @contextmanager
    def telling(self, message: Any) -> Iterator[None]:
        data = pickle.dumps(message)
        self.sent += len(data)
        for inbox in self.room.messages[1:]:
            inbox.put(data)
        yield

    def hear(self) -> Any:
        return pickle.loads(self.room.messages[self.rank].get(timeout=60))

    def lost(self, error: Exception) -> Exception:
        self.room.barrier.abort()
        return error

    def agree(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        self.room.said[self.rank] = tokens
        self.room.barrier.wait()
        agreed = np.max(self.room.said, axis=0)
        self.room.barrier.wait()
        return agreed


def with_ranks(
    size: int, make: Callable[[], TargetModel], use: Callable[[LedTarget], T], least: int = 2
) -> T:
    """Return the result of ``use`` for a target whose drafts ``size`` ranks share.

    Args:
        make: the whole target of a rank.
        least: rows from which on drafts are shared.
    """
    room = _Room(size)
    errors: list[Exception] = []

    def other(rank: int) -> None:
        ranks = ThreadRanks(room, rank, size)
        try:
            target = ParallelTarget(make(), ranks)
            target.least = least
            follow(target, ranks)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=other, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    ranks = ThreadRanks(room, 0, size)
    try:
        target = ParallelTarget(make(), ranks)
        target.least = least
        return use(LedTarget(target, ranks))
    finally:
        with ranks.telling(None):
            pass
        for thread in threads:
            thread.join(60)
        assert not errors, errors
