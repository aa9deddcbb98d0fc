"""Results as JSON and as a report. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outpace.cli import screen
from outpace.cli.writer import check_json, check_out, write_json


def check_outputs(as_json: str | None, html: Path | None) -> None:
    """Refuse files that cannot be written before anything is measured.

    Raises:
        OutpaceError: a file cannot be written, or the plots' library is missing.
    """
    check_json(as_json)
    if html is not None:
        check_out(html, overwrite=True)
        from outpace_lab.bench.html import check_installed

        check_installed()


def write_results(text: str, to_json: str | None, page: Callable[[], str], html: Path | None) -> None:
    """Write results as JSON to a file or standard output, then a report, whose failure does not affect them.

    Args:
        text: the JSON object, on one line.
        page: returns the report.
    """
    write_json(text, to_json)
    if html is not None:
        html.write_text(page(), encoding="utf-8")
        screen.note(f"report: {html}")
