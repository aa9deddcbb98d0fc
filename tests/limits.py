"""Limits of the work that a call may do, as the operating system counts it."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SECONDS, MEBIBYTES = 2, 200  # of the processor, and of memory
_HARD = 4000  # mebibytes of addresses, so that a broken guard does not take the machine

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")


def within_limits(work: Callable[[], Any]) -> Any:
    """Return ``work()``, and fail if it takes more of the processor or of memory than the limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, ((_status("VmSize") + _HARD) << 20, hard))
    before = signal.signal(signal.SIGPROF, _too_long)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    held, began = _status("VmHWM"), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        taken = _status("VmHWM") - held
        assert taken <= MEBIBYTES, f"{taken} MiB"
        assert time.process_time() - began <= SECONDS  # of work that Python cannot interrupt


def unless_it_waits(work: Callable[[], Any]) -> Any:
    """Return ``work()``, and fail if it waits, as a reader of a pipe that nobody writes to, for ever."""
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(60)
    try:
        return work()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class TooLong(BaseException):
    """No handler of errors catches it."""


def _too_long(signum: int, frame: Any) -> None:
    raise TooLong


def _status(name: str) -> int:
    """A size in mebibytes."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) >> 10
