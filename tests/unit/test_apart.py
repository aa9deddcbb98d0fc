"""Loading in a thread that ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from outpace.loading.apart import loaded_apart


def test_the_thread_that_loads_ends() -> None:
    async def load() -> threading.Thread:
        return await loaded_apart(threading.current_thread)

    thread = asyncio.run(load())
    thread.join(60)
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_an_error_of_loading_arrives() -> None:
    def fail() -> None:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        asyncio.run(loaded_apart(fail))
