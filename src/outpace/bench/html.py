"""The report as one HTML file that needs nothing besides: tables, and plots with their data beside them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from html import escape
from itertools import groupby

from outpace.bench import plots
from outpace.bench.items import counted
from outpace.bench.lab.roof import Roof, Width
from outpace.bench.markup import frame, plot, table
from outpace.bench.record import Record
from outpace.bench.remarks import missing, remarks, totals, versions
from outpace.bench.rows import Row, number
from outpace.bench.runs import BASELINE
from outpace.bench.speed import LEAST_GROUPS, Speed


def page(record: Record) -> str:
    """The whole report.

    Raises:
        OutpaceError: matplotlib is not installed.
    """
    plots.check_installed()
    parts = [_head(record)]
    for (suite, batch), found in groupby(record.rows, key=lambda row: (row.suite, row.batch)):
        parts.append(_suite(suite, batch, list(found)))
    if record.roof is not None:
        parts.append(_machine(record.rows, record.roof))
    return frame(f"outpace bench: {record.model['name']}", "\n".join(parts))


def _head(record: Record) -> str:
    machine, model, settings = record.machine, record.model, record.settings
    facts = [
        ("model", f"{model['name']}, {model['dtype']} on {model['device']}"),
        ("machine", f"{machine.get('device') or machine['processor']}, {machine['threads']} threads"),
        ("versions", ", ".join(f"{name} {machine[name]}" for name in ("outpace", "torch", "transformers"))),
        ("new tokens", settings["max_new_tokens"]),
        ("temperature", settings["temperature"]),
        ("repeats after a warm-up", settings["repeats"]),
        ("command", record.command),
    ]
    lines = [f"{name}: {value}" for name, value in facts]
    items = "".join(f"<li>{escape(line)}</li>" for line in [*lines[:3], *versions(record), *lines[3:]])
    notes = "".join(f"<li>{escape(note)}</li>" for note in record.notes)
    incomplete = f"<p class=failed>{escape(missing(record))}</p>" if missing(record) else ""
    return (
        f"<h1>How fast {escape(str(model['name']))} decodes</h1>\n{incomplete}"
        "<p>All methods decoded the same prompts in turns, with the same weights and the same stop rule. "
        "Speed is the median over prompts of the ratio to plain decoding, with a 95% interval by a bootstrap "
        f"over the prompts, of {LEAST_GROUPS} at least; prompts decoded at once count as one.</p>\n"
        f"<ul>{items}</ul>\n" + (f"<p>Notes:</p><ul>{notes}</ul>" if notes else "")
    )


def _suite(suite: str, batch: int, rows: list[Row]) -> str:
    at_once = f", {batch} at once" if batch > 1 else ""
    told = "\n".join(_remark(row) for row in rows if row.error or row.differences)
    parts = [
        f"<section>\n<h2>{escape(suite)}: {counted(rows[0].prompts)}{at_once}</h2>",
        _speeds(rows),
        told,
        *(f"<p>{escape(line)}.</p>" for line in totals(rows)),
        _steps(rows),
        _speed_plot(suite, rows),
    ]
    if any(row.acceptance_by_position for row in rows):
        parts.append(_acceptance_plot(suite, rows))
    return "\n".join([*parts, "</section>"])


def _remark(row: Row) -> str:
    """Why a row failed, or what of its outputs differs."""
    first, *others = map(escape, remarks([row]))
    items = "".join(f"<li>{line}</li>" for line in others)
    said_first = f"<p class=failed>{first}</p>" if row.error else f"<p>{first}:</p>"
    return said_first + (f"<ul>{items}</ul>" if items else "")


def _speeds(rows: Seq[Row]) -> str:
    head = [
        "method",
        "tokens/s",
        "quartiles",
        "speed",
        "95%",
        "decode speed",
        "prefill ms",
        "repeated 4-grams",
        "equal outputs",
    ]
    body = [
        [
            row.label,
            number(row.speed.tokens_per_second, 1),
            " / ".join(number(one, 1) for one in row.speed.quartiles),
            number(row.speed.speedup),
            _span(row.speed),
            number(row.speed.decode_speedup),
            number(1000 * row.speed.prefill_seconds, 1),
            number(row.repeated_4grams),
            f"{row.outputs - row.different}/{row.outputs}",
        ]
        for row in rows
        if row.speed is not None
    ]
    told = (
        "Speed over plain decoding, and outputs equal to its. Quartiles are those of the prompts' tokens/s."
    )
    return table(told, head, body)


def _steps(rows: Seq[Row]) -> str:
    head = [
        "method",
        "steps",
        "tau",
        "accepted",
        "step ms",
        "draft ms",
        "verify ms",
        "rest ms",
        "of the roof",
    ]
    body = []
    for row in rows:
        each = row.milliseconds_per_step
        if row.speed is None:
            continue
        body.append(
            [
                row.label,
                "" if row.steps is None else str(row.steps),
                number(row.tau),
                number(row.acceptance_rate) if row.drafted else "",
                *(number(part) for part in (each.parts if each else [None] * 4)),
                "" if row.roof is None else f"{row.roof.share:.0%}",
            ]
        )
    return table("Steps of the target, and milliseconds of one.", head, body)


def _speed_plot(suite: str, rows: Seq[Row]) -> str:
    shown = [row for row in rows if row.speed is not None and row.drafter != BASELINE]
    names = [*rows[0].categories] if len(rows[0].categories) > 1 else []
    body = [
        [row.label, _with_span(row.speed), *(_with_span(row.categories[name]) for name in names)]
        for row in shown
    ]
    told = "; ".join(f"{row.drafter} {number(row.speed.speedup)}" for row in shown if row.speed is not None)
    return plot(
        plots.speed_by_category(rows, suite),
        f"Bar chart of the speed over plain decoding on {suite}, by category. Over all prompts: {told}.",
        "A bar above the dashed line is faster than plain decoding. The thin lines are 95% intervals.",
        table("Speed over plain decoding, and its 95% interval.", ["method", "all", *names], body),
        wide=len(names) > 4,
    )


def _acceptance_plot(suite: str, rows: Seq[Row]) -> str:
    shown = [row for row in rows if row.acceptance_by_position]
    depth = max(len(row.acceptance_by_position) for row in shown)
    body = [
        [
            str(place + 1),
            *(
                number(row.acceptance_by_position[place]) if place < len(row.acceptance_by_position) else ""
                for row in shown
            ),
        ]
        for place in range(depth)
    ]
    told = "; ".join(f"{row.drafter} {number(row.acceptance_by_position[0])}" for row in shown)
    return plot(
        plots.acceptance_by_depth(rows, suite),
        f"Line chart of acceptance by depth on {suite}. At the first place: {told}.",
        "How many of the steps kept the drafted token at each place. All lines fall: a token stands only "
        "where those before it do.",
        table("Share of steps that accepted a token.", ["place", *(row.drafter for row in shown)], body),
    )


def _machine(rows: Seq[Row], roof: Roof) -> str:
    limits = roof.limits
    widths = [[str(width.rows), number(1000 * width.seconds), *_least(width)] for width in roof.widths]
    one, last = roof.widths[0], roof.widths[-1]
    parts = [
        "<section>\n<h2>The machine</h2>",
        f"<p>Measured here: {limits.bandwidth / 1e9:.1f} GB/s reading {limits.buffer_bytes / 1e6:.0f} MB "
        "(as much as the weights, of large ones 1 GiB), and "
        f"{limits.operations / 1e9:.0f} billion operations per second.</p>",
        plot(
            plots.time_by_width(roof),
            f"Line chart of the time of one forward by its tokens: {1000 * one.seconds:.2f} ms for "
            f"{one.rows}, {1000 * last.seconds:.2f} ms for {last.rows}"
            + ("." if roof.work is None else "; and the least possible."),
            "What a step costs that verifies a draft. Where the line is flat, drafted tokens are free. "
            f"With {roof.context} tokens read before.",
            table("One forward.", ["tokens", "ms", "least ms", "reached"], widths),
        ),
    ]
    if roof.work is not None:
        parts.append(_roofline(rows, roof))
    return "\n".join([*parts, "</section>"])


def _least(width: Width) -> list[str]:
    """The least possible milliseconds, and the share reached."""
    if width.least is None:
        return ["", ""]
    return [number(1000 * width.least), f"{width.least / width.seconds:.0%}"]


def _roofline(rows: Seq[Row], roof: Roof) -> str:
    reached = [
        [f"{row.suite}, {row.drafter}" + (f", {row.batch} at once" if row.batch > 1 else ""),
         number(row.roof.bytes_per_step / 1e6, 1), number(row.roof.operations_per_step / 1e6, 1),
         number(row.roof.least_milliseconds), row.roof.bound_by, f"{row.roof.share:.0%}"]
        for row in rows if row.roof is not None
    ]  # fmt: skip
    return plot(
        plots.roofline(rows, roof),
        "Roofline: operations per second over operations per byte. "
        + "; ".join(f"{line[0]} reaches {line[-1]} of the limit" for line in reached),
        "The line is the best that was measured here: on its slope the memory is the limit, on its flat "
        "part arithmetic is. A step above it would say that the machine can do more than was measured. "
        "Drafting moves a step to the right, where more is done for each byte.",
        table(
            "The mean step's forward.",
            ["row", "MB moved", "million operations", "least ms", "limit", "reached"],
            reached,
        ),
    )


def _span(speed: Speed) -> str:
    return "" if speed.interval is None else f"{speed.interval[0]:.2f} to {speed.interval[1]:.2f}"


def _with_span(speed: Speed | None) -> str:
    if speed is None:
        return ""
    span = _span(speed)
    return number(speed.speedup) + (f" ({span})" if span else "")
