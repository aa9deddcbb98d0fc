"""Reports as a self-contained HTML file: jinja2 templates filled with figures and plots."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from outpace.bench import remarks
from outpace.bench.items import counted
from outpace.bench.rows import Row, number
from outpace.bench.runs import BASELINE
from outpace.bench.speed import LEAST_GROUPS
from outpace.core import OutpaceError, install
from outpace_lab.bench import plots
from outpace_lab.bench.results import LabRecord

_TEMPLATES = Path(__file__).parent / "templates"


def check_installed() -> None:
    """Check that a report can be written.

    Raises:
        OutpaceError: matplotlib or jinja2 is not installed.
    """
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise OutpaceError(f"--html needs {missing[0]}: {install('bench', 'outpace-lab')}, or leave it out")


def page(record: LabRecord) -> str:
    """Write the report of a benchmark.

    Raises:
        OutpaceError: matplotlib or jinja2 is not installed.
    """
    parts = [
        {"name": suite, "batch": batch, "rows": list(rows)}
        for (suite, batch), rows in groupby(record.rows, key=lambda row: (row.suite, row.batch))
    ]
    return render("report", record=record, parts=parts, baseline=BASELINE, least_groups=LEAST_GROUPS)


def render(name: str, **values: Any) -> str:
    """Fill a template; all text is escaped.

    Raises:
        OutpaceError: matplotlib or jinja2 is not installed.
    """
    check_installed()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "percent": lambda share, digits=0: f"{share:.{digits}%}",
        "span": _span,
        "title": _title,
        "counted": counted,
        "missing": remarks.missing,
        "remarks": remarks.remarks,
        "totals": remarks.totals,
        "verdicts": remarks.verdicts,
        "versions": remarks.versions,
    }
    return environment.get_template(f"{name}.html.jinja").render(values, plots=plots)


def _span(interval: Seq[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def _title(row: Row) -> str:
    """A row's name, with its suite and batch size."""
    return f"{row.suite}, {row.drafter}" + (f", {row.batch} at once" if row.batch > 1 else "")
