"""``outpace bench compare``: two results side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import benchmarks, guarded

FirstResult = Annotated[Path, typer.Argument(metavar="A.json", show_default=False)]
SecondResult = Annotated[Path, typer.Argument(metavar="B.json", show_default=False)]


@benchmarks.command("compare", epilog="Example: [bold]outpace bench compare monday.json friday.json[/bold]")
@guarded
def compare_benchmarks(first: FirstResult, second: SecondResult, as_json: o.AsJson = False) -> None:
    """Compare two results of `outpace bench --json FILE` side by side."""
    with screen.busy("reading ..."):
        from outpace.bench import comparison
        from outpace.bench.record import read_rows
        from outpace.cli import bench_tables as bench_report

        (one, rows), (two, others) = read_rows(first), read_rows(second)
        found = comparison.compare(one, two, (rows, others))
    if as_json:
        typer.echo(json.dumps(comparison.as_json(found), indent=2))
    else:
        bench_report.compared(found, screen.out())
