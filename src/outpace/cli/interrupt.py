"""Handling of Ctrl-C between two steps rather than in the middle of one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """Context in which the first Ctrl-C sets ``raised`` and the second one raises KeyboardInterrupt.

    A loop that checks ``raised`` between steps stops in a consistent state. The terminal does not echo ``^C``
    into what is being drawn.
    """

    def __init__(self) -> None:
        self.raised = False
        self._before: Any = None
        self._restore: Callable[[], None] = _nothing

    def __enter__(self) -> Interrupt:
        # Handlers can be set in the main thread only; other threads do not receive Ctrl-C anyway.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
            self._restore = _without_control_echo()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.raised:
            raise KeyboardInterrupt
        self.raised = True


def _nothing() -> None:
    pass


def _without_control_echo() -> Callable[[], None]:
    """Stop the terminal from echoing control characters; return a function that undoes it."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, AttributeError, OSError, ValueError):
        return _nothing  # not supported on this platform, or no terminal
    except termios.error:
        return _nothing
    quiet = list(before)
    quiet[3] &= ~termios.ECHOCTL
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    return lambda: termios.tcsetattr(terminal, termios.TCSANOW, before)
