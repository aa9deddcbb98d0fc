"""Progress of long work, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outpace.cli import screen


class Bar:
    """A progress bar on standard error; without a terminal, a line at every tenth."""

    def __init__(self, total: int, what: str, progress: Progress | None) -> None:
        self._total = total
        self._what = what
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what, total=total, note="")
        self._done = 0

    def note(self, text: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, note=text)

    def advance(self, text: str = "", steps: int = 1) -> None:
        self._done += steps
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=steps, note=text)
        elif self._done * 10 // self._total > (self._done - steps) * 10 // self._total:
            screen.note(f"{self._what}: {self._done} of {self._total}" + (f", {text}" if text else ""))


@contextmanager
def bar(total: int, what: str) -> Iterator[Bar]:
    console = screen.err()
    if not screen.live(console):
        yield Bar(total, what, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
        TimeRemainingColumn(),
    )
    # Redirect standard output through the bar's console only if both are the same terminal.
    with Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty(), transient=True) as progress:
        yield Bar(total, what, progress)
