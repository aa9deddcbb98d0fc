"""Interrupts at every line of a call: a trace function raises where a signal's handler could.

It can raise where no signal can: at the end of a ``with`` block of a lock, which C code takes and releases
without a look at signals in between. Those lines are left out.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import outpace

_LOCKS = ("_lock", "_claims", ".alone")  # how they are named
_SOURCE = str(Path(outpace.__file__).parent)


class Line(NamedTuple):
    """A line of the package, by its file and number."""

    file: str
    number: int

    @property
    def locks(self) -> bool:
        """True for a ``with`` statement of a lock."""
        return self.text.startswith("with ") and any(name in self.text for name in _LOCKS)

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file[len(_SOURCE) + 1 :]}:{self.number}"


class Interrupted(KeyboardInterrupt):
    """An interrupt raised on purpose."""


def lines(call: Callable[[], Any]) -> Counter[Line]:
    """The lines of the package that a call executes in this thread, with how often."""
    found: Counter[Line] = Counter()
    with traced(lambda line: found.update([line])):
        call()
    return found


def interrupt(
    call: Callable[[], Any], at: Line, time: int = 1, error: type[BaseException] = Interrupted
) -> bool:
    """Make a call, and raise before a line of it; return whether the line was reached.

    Args:
        time: how often the line is reached until then.
    """
    left = time

    def watch(line: Line) -> None:
        nonlocal left
        left -= line == at
        if not left:
            left = -1
            raise error

    try:
        with traced(watch):
            call()
    except error:
        pass
    return left < 0


@contextmanager
def traced(see: Callable[[Line], None]) -> Iterator[None]:
    """Context in which a function is called before each line of the package that this thread executes."""
    before = sys.gettrace()
    sys.settrace(tracer(see))
    try:
        yield
    finally:
        sys.settrace(before)


def tracer(see: Callable[[Line], None]) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that calls another before each line of the package."""

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return at_line if frame.f_code.co_filename.startswith(_SOURCE) else None

    def at_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            see(Line(frame.f_code.co_filename, frame.f_lineno))
        return at_line

    return enter


def spread(found: Counter[Line], every: int, offset: int = 0) -> list[tuple[Line, int]]:
    """Each ``every``-th line, in the order of the source, and one of the times that it is reached."""
    chosen = sorted(line for line in found if not line.locks)[offset % every :: every]
    return [(line, 1 + (7 * place) % found[line]) for place, line in enumerate(chosen)]
