"""Guards of an engine: one thread and one call at a time, integer arguments."""

from __future__ import annotations

import inspect
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, TypeVar

from outpace.core import OutpaceError, in_progress

T = TypeVar("T")


class CallGuard:
    """Ownership of an engine by the first thread that calls it, one call at a time: a context manager.

    Another thread may take over once the owner has ended, or after ``release``.

    An exception may come at any line, also between the end of a call and its note here. So nothing is
    released: a call is in progress while the frame that it was made from is on the stack of its thread. A
    call that is noted and is not on the stack was interrupted, and the next one begins with ``renew``.

    Args:
        renew: makes the engine as new after a call that did not end as it should. Called again if it does not
            end either.

    Attributes:
        broken: True if the engine must be renewed before the next call.
    """

    def __init__(self, renew: Callable[[], None]) -> None:
        self.broken = False
        self._renew = renew
        self._claims = threading.Lock()
        self._owner: threading.Thread | None = None
        self._call: FrameType | None = None
        self._lent: list[tuple[weakref.ref[Generator[Any]], list[Callable[[], None]]]] = []

    # Two methods, since `contextlib` costs several times as much in each step.
    def __enter__(self) -> None:
        """Begin a call to the engine."""
        if self._owner is not threading.current_thread():
            self._claim(threading.current_thread())
        here = sys._getframe(1)
        if self._call is not None:
            if self._call is not here and in_progress(self._call):
                raise OutpaceError(
                    "the engine was called in the middle of a call, by a logits processor, a criterion, a "
                    "drafter or an observer; call it between two steps"
                )
            self.broken = True
        self._call = here
        if self.broken:
            self._renew()
            for _, held in self._lent:
                held.clear()
            self.broken = False
        if self._lent:
            self._take_back()

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """End the call; an interrupt may have left anything half done."""
        if kind is not None and not issubclass(kind, Exception):
            self.broken = True
        self._call = None

    def _claim(self, here: threading.Thread) -> None:
        with self._claims:  # C code, which no signal interrupts
            owner = self._owner
            if owner is None or not owner.is_alive():
                self._owner = here
        if self._owner is not here:
            assert owner is not None
            raise OutpaceError(
                f"this engine belongs to the thread {owner.name!r}, which used it first, and was called from "
                f"{here.name!r}; use outpace.AsyncEngine, or one engine per thread"
            )

    def lend(self, iterator: Generator[T], held: list[Callable[[], None]]) -> Generator[T]:
        """Note an iterator that holds a part of the engine between calls, and return it.

        Args:
            held: functions that give the part back, for an iterator that ends before it has done so itself.
        """
        self._lent.append((weakref.ref(iterator), held))
        return iterator

    def _take_back(self) -> None:
        for lent in list(self._lent):
            reference, held = lent
            iterator = reference()
            if iterator is None or inspect.getgeneratorstate(iterator) == inspect.GEN_CLOSED:
                for give_back in held:
                    give_back()
                self._lent.remove(lent)

    def release(self) -> None:
        """Give up ownership."""
        self._owner = None


def whole_number(name: str, value: Any, least: int) -> int:
    """Check an argument that must be a whole number, and return it as an int.

    Raises:
        OutpaceError: it is not a whole number, or too small.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise OutpaceError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return number
