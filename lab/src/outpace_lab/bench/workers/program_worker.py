"""Run one generated Python program with limits, in a separate process; imports nothing from outpace.

Arguments: seconds of processor time, bytes of memory. The program is read from standard input. The process
writes ``passed`` to standard output, and nothing else, if the program ran to its end.

This keeps mistakes of a model from doing harm: endless loops, huge allocations, files, processes and network
connections. It is not a sandbox against code that tries to escape.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

# Events of sys.audit that a program which only computes a result does not raise.
_REFUSED = (
    "ctypes.",
    "fcntl.",
    "ftplib.",
    "os.",
    "pty.",
    "shutil.",
    "signal.",
    "smtplib.",
    "socket.",
    "subprocess.",
    "tempfile.",
    "urllib.",
    "winreg.",
)
_ALLOWED = ("os.listdir", "os.scandir", "os.walk")  # the import system's own
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _audit(event: str, given: tuple[Any, ...]) -> None:
    """Refuse files opened for writing, processes, connections and foreign functions."""
    if event == "open":
        mode, flags = given[1], given[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (flags and flags & _WRITING):
            raise PermissionError("a generated program may not write files")
    elif event.startswith(_REFUSED) and event not in _ALLOWED:
        raise PermissionError(f"a generated program may not use {event}")


def main() -> None:
    """Read a program and run it under the limits of the arguments."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    source = sys.stdin.read()
    told = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    sys.addaudithook(_audit)
    try:
        exec(compile(source, "generated", "exec"), {"__name__": "__main__"})
    except BaseException:  # whatever the program raises, SystemExit included, it did not pass
        os._exit(1)
    # Pipes are not subject to RLIMIT_FSIZE.
    os.write(told, b"passed")
    os._exit(0)


if __name__ == "__main__":
    main()
