"""The tables of ``outpace bench`` and ``outpace bench compare`` in a terminal."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import astuple
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outpace.bench.items import counted
from outpace.bench.record import Record
from outpace.bench.remarks import missing, remarks, totals, versions
from outpace.bench.rows import Row, number
from outpace_lab.bench.comparison import Comparison

_LOOK: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "show_edge": False,
    "title_justify": "left",
    "title_style": "dim",
}
_DEPTHS = 8


def show(record: Record, console: Console) -> None:
    """Print all tables and notes."""
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
        if any(row.quality for row in rows):
            tables.append(qualities(rows))
        if any(row.categories for row in rows[1:]) and len(rows[0].categories) > 1:
            tables.append(categories(rows))
        for table in tables:
            console.print(table, "")
        for line in [*remarks(rows), *totals(rows)]:
            console.print(line, soft_wrap=True)
    for line in versions(record):
        console.print(line, soft_wrap=True)
    for note in record.notes:
        console.print(f"Note: {note}", soft_wrap=True)
    if missing(record):
        console.print(missing(record), soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table("method", title=title, **_LOOK)
    table.columns[0].overflow = "fold"
    for column in columns:
        table.add_column(column, justify="right")
    return table


def span(interval: tuple[float, float] | None) -> str:
    """A confidence interval as text."""
    return "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def speeds(rows: Seq[Row]) -> Table:
    """Table of speeds, their intervals, and equality of outputs."""
    table = _table("speed over plain decoding", "tokens/s", "speed", "95%", "decode", "4-grams", "equal")
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
    """Table of steps and the parts of their time."""
    table = _table(
        "steps, and milliseconds of each",
        *("steps", "tau", "kept", "step", "draft", "verify", "rest", "first", "roof"),
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
            "" if row.roof is None else f"{row.roof.share:.0%}",
        )
    return table


def latencies(rows: Seq[Row]) -> Table:
    """Table of the times between tokens and of the loop."""
    table = _table(
        "milliseconds between tokens and per loop iteration; variances in square milliseconds",
        *("mean", "variance", "p50", "p90", "p99", "loop", "variance"),
    )
    for row in rows:
        if row.latency is not None:
            table.add_row(row.label, *(number(figure) for figure in astuple(row.latency)))
    return table


def qualities(rows: Seq[Row]) -> Table:
    """Table of the grades of the answers, beside the speed."""
    table = _table("quality of the answers", "graded", "prompts", "score", "better", "worse", "speed")
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


def acceptance(rows: Seq[Row]) -> Table:
    """Table of the share of steps that accepted a token, by depth."""
    deepest = max(len(row.acceptance_by_position) for row in rows)
    depths = range(min(deepest, _DEPTHS))
    title = "steps that accepted a token, by its place in the draft"
    if deepest > _DEPTHS:
        title += f" (the first {_DEPTHS} of {deepest}; --json and --html have all)"
    table = _table(title, *(str(i + 1) for i in depths))
    for row in rows:
        if row.acceptance_by_position:
            shares = row.acceptance_by_position[:_DEPTHS]
            table.add_row(row.label, *(number(share) for share in shares))
    return table


def categories(rows: Seq[Row]) -> Table:
    """Table of speeds by category."""
    names = list(rows[0].categories)
    table = _table("speed by category", *names)
    for row in rows[1:]:
        if row.categories:
            table.add_row(row.label, *(number(row.categories[name].speedup) for name in names))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.overflow = "fold"
    return table


def compared(found: Comparison, console: Console) -> None:
    """Print two benchmarks side by side."""
    table = _table("speed over plain decoding", "first", "95%", "second", "95%", "change", "overlap")
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
