"""Loading in a thread that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def loaded_apart(load: Callable[[], T]) -> T:
    """Load in a thread of its own, which takes with it the threads that torch started for it.

    torch has a team of threads for each thread that has had work to share. Where these are more than the
    processors, all wait for each other asleep, and the engine's, which come later, take twice as long.
    """
    thread = ThreadPoolExecutor(1, "outpace-loading")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, load)
    finally:
        thread.shutdown(wait=False)
