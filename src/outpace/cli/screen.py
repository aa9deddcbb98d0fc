"""The terminal: consoles, what may be shown on one, and the spinner of slow work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from rich.console import Console
from rich.text import Text

# Control characters would let a model's text move the cursor or retitle the window.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def out() -> Console:
    """Standard output."""
    return Console(highlight=False)


def err() -> Console:
    """Standard error: notices, progress, statistics."""
    return Console(stderr=True, highlight=False)


def live(console: Console) -> bool:
    """True if the output can be redrawn in place."""
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


def printable(text: str) -> str:
    """Text without control characters, line breaks and tabs excepted."""
    return text.translate(_CONTROL)


def write(text: str) -> None:
    """Text to standard output at once, as it is; without control characters where that is a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(message: str, style: str = "dim") -> None:
    """One line on standard error."""
    err().print(Text(printable(message), style=style), soft_wrap=True)


@contextmanager
def of_the_first() -> Iterator[None]:
    """Silence all but one of several processes that a launcher started; errors are shown."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def busy(message: str) -> Iterator[None]:
    """A spinner on standard error while something slow runs; nothing where that is not a terminal."""
    console = err()
    if not live(console):
        yield
        return
    with console.status(Text(printable(message), style="dim")):
        yield
