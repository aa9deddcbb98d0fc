"""The command ``outpace``, which is also ``python -m outpace``."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType

# A thread that waits for others spins for milliseconds, longer than a step's part takes; where other programs
# need the processors, it takes the time that the others wait for. libgomp reads it when torch is imported.
_SPINS = "10000"
_INTERRUPTED = 130  # as in outpace.cli.app, which may be what an interrupt kept from being imported


def main() -> None:
    """Run the command line. However often and whenever Ctrl-C is pressed, there is no traceback."""
    sys.excepthook = _report
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    try:
        from outpace.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, _end)  # the process is ending, and need not be asked again


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nothing has caught, unless it is an interrupt."""
    if issubclass(kind, KeyboardInterrupt):
        _end(signal.SIGINT, None)
    sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    main()
