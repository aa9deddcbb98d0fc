"""The tables of ``outpace bench lab`` and ``outpace bench compare`` in a terminal."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import cast

from rich.console import Console
from rich.table import Table

from outpace.bench.rows import Row, number
from outpace.cli import bench_tables
from outpace.cli.bench_tables import new_table, span
from outpace_lab.bench.comparison import Comparison
from outpace_lab.bench.results import LabRecord, LabRow


def show(record: LabRecord, console: Console) -> None:
    """Print all tables and notes."""
    bench_tables.show(record, console, _further)


def _further(rows: Seq[Row]) -> list[Table]:
    """Tables of the roof and of grades, where they are known."""
    found = cast(Seq[LabRow], rows)
    tables = [roofs(found)] if any(row.roof for row in found) else []
    return [*tables, qualities(found)] if any(row.quality for row in found) else tables


def roofs(rows: Seq[LabRow]) -> Table:
    """Table of the least time of the mean step's forward, and its share of the measured time."""
    table = new_table("the mean step's forward against the machine's roof", "least ms", "bound by", "share")
    for row in rows:
        if row.roof is not None:
            least = number(row.roof.least_milliseconds)
            table.add_row(row.label, least, row.roof.bound_by, f"{row.roof.share:.0%}")
    return table


def qualities(rows: Seq[LabRow]) -> Table:
    """Table of the grades of the answers, beside the speed."""
    table = new_table("quality of the answers", "graded", "prompts", "score", "better", "worse", "speed")
    for row in rows:
        for one in row.quality:
            table.add_row(
                row.label,
                one.kind,
                str(one.prompts),
                number(one.score, 3),
                str(one.better),
                str(one.worse),
                number(row.speed.speedup if row.speed else None),
            )
    return table


def compared(found: Comparison, console: Console) -> None:
    """Print two benchmarks side by side."""
    table = new_table("speed over plain decoding", "first", "95%", "second", "95%", "change", "overlap")
    for pair in found.pairs:
        name = f"{pair.suite}, {pair.drafter}" + (f", {pair.batch} at once" if pair.batch > 1 else "")
        one, two = pair.first, pair.second
        words = {None: "", True: "yes", False: "no"}
        table.add_row(
            name,
            "failed" if one["error"] else number(one["speedup"]),
            span(one["speedup_interval"]),
            "failed" if two["error"] else number(two["speedup"]),
            span(two["speedup_interval"]),
            number(pair.change),
            words[pair.overlap],
        )
    console.print(table)
    if found.comparable:
        share = found.agreeing / len(found.comparable)
        console.print(
            f"The intervals of {found.agreeing} of {len(found.comparable)} rows overlap ({share:.0%}).",
            soft_wrap=True,
        )
    for names, which in ((found.only_first, "first"), (found.only_second, "second")):
        if names:
            rows = ", ".join(f"{suite} {drafter} {batch}" for suite, drafter, batch in names)
            console.print(f"Only in the {which}: {rows}", soft_wrap=True)
    for line in found.differing:
        console.print(f"Not the same: {line}", soft_wrap=True)
