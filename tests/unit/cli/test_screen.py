"""Output to a terminal, and Ctrl-C between steps."""

from __future__ import annotations

import io
import signal
import sys

import pytest
import typer
from rich.console import Console
from rich.table import Table

from outpace.catalogue import attributes
from outpace.cli import screen
from outpace.cli.app import INTERRUPTED, guarded
from outpace.cli.interrupt import Interrupt
from outpace.cli.progress import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\tb\x1b]0;title\x07\n\x9bc\x7f"
    for stream, expected in ((Terminal(), "a\tb]0;title\nc"), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        screen.write(text)
        assert stream.getvalue() == expected


def test_markup_in_a_message_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    screen.note("[red]x[/red] [/nothing]")
    assert capsys.readouterr().err == "[red]x[/red] [/nothing]\n"


def test_the_first_interrupt_is_noted_and_the_second_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.raised
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_progress_without_a_terminal_is_a_line_at_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with bar(40, "prompts") as progress:
        for _ in range(40):
            progress.note("ignored")
            progress.advance("fast")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert (lines[0], lines[-1]) == ("prompts: 4 of 40, fast", "prompts: 40 of 40, fast")


def test_attributes_of_a_docstring() -> None:
    doc = (
        "First.\n\nAttributes:\n    one: the first,\n        on two lines.\n    two: the second.\n\nMore: no."
    )
    assert attributes(doc) == {"one": "the first, on two lines.", "two": "the second."}
    assert attributes("Nothing.") == {}


def test_an_interrupt_in_the_middle_of_an_import_is_no_error_of_the_import(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @guarded
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module 'AutoTokenizer'") from error

    @guarded
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'faiss'")

    with pytest.raises(typer.Exit) as ended:
        interrupted()
    assert ended.value.exit_code == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(ModuleNotFoundError):
        missing()


def test_a_table_that_is_too_wide_becomes_lines() -> None:
    table = Table("method", "tokens per second", "steps", title="speed")
    table.add_row("suffix:memory=0", "51.25", "")
    table.add_row("none", "31.02", "128")
    assert screen.fitting(table, Console(width=80)) is table
    narrow = Console(width=20, file=io.StringIO(), record=True)
    narrow.print(screen.fitting(table, narrow))
    shown = narrow.export_text()
    assert "\u2026" not in shown and max(map(len, shown.splitlines())) <= 20
    words = " ".join(shown.split())
    assert words == ("speed suffix:memory=0 tokens per second 51.25 none tokens per second 31.02 steps 128")
