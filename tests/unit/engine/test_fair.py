"""A lock whose threads have equal times of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from outpace.engine.fair import FairLock


def together(lock: FairLock, *works: Callable[[], None]) -> None:
    """Run these in threads, which wait for the lock in this order."""
    threads = [threading.Thread(target=work) for work in works]
    with lock:
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(lock._line) < count:
                pass
    for thread in threads:
        thread.join(60)
    assert lock._holder is None and not lock._line


def test_who_waits_is_next_and_who_leaves_goes_behind() -> None:
    order, ticks = list[int](), [0.0]
    lock = FairLock(lambda: ticks[0])

    def take(number: int) -> None:
        for one in (number, -1) if number == 0 else (number,):
            with lock:
                order.append(one)
                ticks[0] += 1

    together(lock, *(lambda number=number: take(number) for number in range(3)))  # type: ignore[misc]
    assert order == [0, 1, 2, -1]


def test_long_turns_get_no_more_time_than_short_ones() -> None:
    ticks, order = [0.0], list[int]()
    lock = FairLock(lambda: ticks[0], back=60)

    def take(length: int, turns: int) -> None:
        for _ in range(turns):
            with lock:
                order.append(length)
                ticks[0] += length

    together(lock, lambda: take(10, 5), lambda: take(1, 60))
    assert order[:44] == [10, *[1] * 10] * 4


def test_a_thread_that_does_not_come_back_is_not_waited_for() -> None:
    ticks, order = [0.0], list[int]()
    lock = FairLock(lambda: ticks[0], back=0)

    def take(length: int, turns: int) -> None:
        for _ in range(turns):
            with lock:
                order.append(length)
                ticks[0] += length

    together(lock, lambda: take(10, 3), lambda: take(1, 1))
    assert order == [10, 1, 10, 10]


def test_time_without_asking_is_lost() -> None:
    ticks = [0.0]
    lock = FairLock(lambda: ticks[0])
    for _ in range(5):
        with lock:
            ticks[0] += 10
    late = threading.Thread(target=lambda: lock.__enter__() or lock.__exit__(None, None, None))
    late.start()
    late.join(60)
    assert lock._start == 40  # not 0, by which it would keep the others out for as long as they had it


def test_an_error_gives_the_lock_back() -> None:
    lock = FairLock()
    with pytest.raises(ValueError), lock:
        raise ValueError
    with lock:
        assert lock._holder is threading.current_thread()
