"""Terminal output: consoles, safe text, and the spinner for slow work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# Control characters would let a model's text move the cursor or retitle the window.
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def out() -> Console:
    return Console(highlight=False)


def err() -> Console:
    """Console on standard error, for notices, progress and statistics."""
    return Console(stderr=True, highlight=False)


def live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


def printable(text: str) -> str:
    """Text without control characters other than line breaks and tabs."""
    return text.translate(_CONTROL)


def write(text: str) -> None:
    """Write text to standard output and flush; without control characters if that is a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def fitting(table: Table, console: Console) -> RenderableType:
    """A table or, where its words are wider than the console, a line for each cell."""
    wide = console.options.update(width=1000)
    if Measurement.get(console, wide, table).minimum <= console.width:
        return table
    lines = [Text(str(table.title), style="dim")] if table.title else []
    for label, *cells in zip(*(column.cells for column in table.columns), strict=True):
        lines.append(Text(str(label), style="bold"))
        named = zip(table.columns[1:], cells, strict=True)
        lines += [Text(f"  {column.header}  {cell}") for column, cell in named if str(cell)]
    return Group(*lines)


def note(message: str, style: str = "dim") -> None:
    err().print(Text(printable(message), style=style), soft_wrap=True)


@contextmanager
def of_the_first() -> Iterator[None]:
    """Silence all but the first of several processes that a launcher started; errors are shown."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def busy(message: str) -> Iterator[Callable[[], None]]:
    """Context of a spinner on standard error, and a function that ends it; nothing if that is no terminal."""
    console = err()
    if not live(console):
        yield lambda: None
        return
    with console.status(Text(printable(message), style="dim")) as status:
        yield status.stop
