"""Work that stops in the middle: a function that runs a while at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class Errand(Generic[T]):
    """A function in a thread of its own, which runs only while another thread waits for it.

    So it can stop in the middle of a forward, with nothing changed in what it computes, and nothing runs
    beside it.

    Args:
        work: the function; it calls what it is given wherever it can stop.
        clock: function that returns the time in seconds.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T], clock: Callable[[], float]) -> None:
        self._work, self._clock = work, clock
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._until = 0.0
        self._left = self._ended = False
        self._found: T | None = None
        self._error: BaseException | None = None
        self._threads = torch.get_num_threads()  # OpenMP counts them per thread
        self._thread: threading.Thread | None = None

    def advance(self, seconds: float) -> bool:
        """Run on for about this time; return True once the function has ended."""
        self._until = self._clock() + seconds
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outpace-errand", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self._ended:
            self._thread.join()
        return self._ended

    def result(self) -> T | None:
        """What the function returned, once it has ended.

        Raises:
            BaseException: what it raised.
        """
        if self._error is not None:
            raise self._error
        return self._found

    def close(self) -> None:
        """End the function where it has stopped."""
        if self._thread is not None and self._thread.is_alive():
            self._left = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._found = self._work(self._pause)
        except BaseException as error:
            self._error = error
        finally:
            self._ended = True
            self._back.release()

    def _pause(self) -> None:
        if not self._left and self._clock() >= self._until:
            self._back.release()
            self._go.acquire()
        if self._left:
            raise _Left


class _Left(BaseException):
    """The end of a function whose result nobody needs."""


@contextmanager
def stopping(modules: Iterable[nn.Module], stop: Callable[[], None]) -> Iterator[None]:
    """A context in which modules call a function before their forwards in this thread."""
    here = threading.get_ident()

    def look(module: nn.Module, given: Any) -> None:
        if threading.get_ident() == here:
            stop()

    hooks = [module.register_forward_pre_hook(look) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
