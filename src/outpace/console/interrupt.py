"""Ctrl-C between two steps rather than in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While this is open the first Ctrl-C sets ``raised``; the second one is a KeyboardInterrupt.

    A loop that looks at ``raised`` between steps stops with everything it has decoded in a sound state.
    """

    def __init__(self) -> None:
        self.raised = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        # Handlers can be set in the main thread only; elsewhere Ctrl-C does not arrive anyway.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.raised:
            raise KeyboardInterrupt
        self.raised = True
