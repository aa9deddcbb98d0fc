"""A lock that threads get in the order in which they ask."""

from __future__ import annotations

import threading

import pytest

from outpace.engine.fair import FairLock


def test_who_waits_is_next_and_who_leaves_goes_behind() -> None:
    lock, order = FairLock(), list[int]()

    def take(number: int) -> None:
        with lock:
            order.append(number)
        if number == 0:
            with lock:
                order.append(-1)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(3)]
    with lock:
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(lock._line) < count:
                pass
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, -1]
    assert not lock._held and not lock._line


def test_an_error_gives_the_lock_back() -> None:
    lock = FairLock()
    with pytest.raises(ValueError), lock:
        raise ValueError
    with lock:
        assert lock._held
