"""The tables of ``outpace bench`` in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import astuple
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outpace.bench.items import counted
from outpace.bench.record import BenchRecord
from outpace.bench.remarks import missing, remarks, totals, verdicts, versions
from outpace.bench.rows import Row, number
from outpace.cli import screen

_LOOK: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "show_edge": False,
    "title_justify": "left",
    "title_style": "dim",
}
_DEPTHS = 8


def no_tables(rows: Seq[Row]) -> list[Table]:
    del rows
    return []


def show(
    record: BenchRecord, console: Console, further: Callable[[Seq[Row]], list[Table]] = no_tables
) -> None:
    """Print all tables and notes.

    Args:
        further: makes further tables of a suite's rows.
    """
    model, machine = record.model, record.machine
    device = machine.get("device") or f"{machine['processor']}, {machine['threads']} threads"
    console.print(f"{model['name']}, {model['dtype']} on {model['device']} ({device})", soft_wrap=True)
    for (suite, batch), found in groupby(record.rows, key=lambda row: (row.suite, row.batch)):
        rows = list(found)
        at_once = f", {batch} at once" if batch > 1 else ""
        console.print(f"\n{suite}: {counted(rows[0].prompts)}{at_once}", style="bold")
        tables = [speeds(rows), steps(rows)]
        if any(row.latency for row in rows):
            tables.append(latencies(rows))
        if any(row.acceptance_by_position for row in rows):
            tables.append(acceptance(rows))
        if any(row.categories for row in rows[1:]) and len(rows[0].categories) > 1:
            tables.append(categories(rows))
        for table in (*tables, *further(rows)):
            console.print(screen.fitting(table, console), "")
        for line in [*remarks(rows), *totals(rows)]:
            console.print(line, soft_wrap=True)
    for line in versions(record):
        console.print(line, soft_wrap=True)
    for note in record.notes:
        console.print(f"Note: {note}", soft_wrap=True)
    if missing(record):
        console.print(missing(record), soft_wrap=True)
    for line in verdicts(record):
        console.print(Text(line, style="bold"), soft_wrap=True)


def new_table(title: str, *columns: str) -> Table:
    table = Table("method", title=title, **_LOOK)
    table.columns[0].overflow = "fold"
    for column in columns:
        table.add_column(column, justify="right")
    return table


def span(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def speeds(rows: Seq[Row]) -> Table:
    table = new_table("speed over plain decoding", "tokens/s", "speed", "95%", "decode", "4-grams", "equal")
    for row in rows:
        if row.speed is None:
            table.add_row(row.label, "failed")
            continue
        speed = row.speed
        table.add_row(
            row.label,
            number(speed.tokens_per_second, 1),
            number(speed.speedup),
            span(speed.interval),
            number(speed.decode_speedup),
            number(row.repeated_4grams),
            "yes" if row.equal else f"{row.outputs - row.different}/{row.outputs}",
        )
    return table


def steps(rows: Seq[Row]) -> Table:
    table = new_table(
        "steps, and milliseconds of each",
        *("steps", "tau", "kept", "step", "draft", "verify", "rest", "first"),
    )
    for row in rows:
        if row.speed is None:
            continue
        each = row.milliseconds_per_step
        table.add_row(
            row.label,
            "" if row.steps is None else str(row.steps),
            number(row.tau),
            number(row.acceptance_rate) if row.drafted else "",
            *(number(part) for part in (each.parts if each else [None] * 4)),
            number(1000 * row.speed.prefill_seconds, 1),
        )
    return table


def latencies(rows: Seq[Row]) -> Table:
    table = new_table(
        "milliseconds between tokens and per loop iteration; variances in square milliseconds",
        *("mean", "variance", "p50", "p90", "p99", "loop", "variance"),
    )
    for row in rows:
        if row.latency is not None:
            table.add_row(row.label, *(number(figure) for figure in astuple(row.latency)))
    return table


def acceptance(rows: Seq[Row]) -> Table:
    deepest = max(len(row.acceptance_by_position) for row in rows)
    depths = range(min(deepest, _DEPTHS))
    title = "steps that accepted a token, by its place in the draft"
    if deepest > _DEPTHS:
        title += f" (the first {_DEPTHS} of {deepest}; --json has all)"
    table = new_table(title, *(str(i + 1) for i in depths))
    for row in rows:
        if row.acceptance_by_position:
            shares = row.acceptance_by_position[:_DEPTHS]
            table.add_row(row.label, *(number(share) for share in shares))
    return table


def categories(rows: Seq[Row]) -> Table:
    names = list(rows[0].categories)
    table = new_table("speed by category", *names)
    for row in rows[1:]:
        if row.categories:
            table.add_row(row.label, *(number(row.categories[name].speedup) for name in names))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.overflow = "fold"
    return table
