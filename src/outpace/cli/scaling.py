"""``outpace bench scaling``: the scaling law of lookahead decoding on a user's model and prompts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outpace.bench.items import Suite, counted
from outpace.bench.lab.roof import work_of
from outpace.bench.lab.scaling import Scaling, Setting, measure_scaling
from outpace.bench.lab.scaling_page import as_json, page, verdict
from outpace.bench.machine import machine
from outpace.bench.run import Settings
from outpace.bench.subject import fitting
from outpace.cli import screen
from outpace.cli.interrupt import Interrupt
from outpace.cli.progress import bar
from outpace.cli.writer import STANDARD_OUTPUT, write_results
from outpace.core import OutpaceError
from outpace.loading import Loaded


def grid_of(windows: str, ngrams: str) -> list[Setting]:
    """Every pair of the two lists.

    Raises:
        OutpaceError: no numbers, or numbers too small.
    """
    sizes = _numbers("ngrams", ngrams, 2)
    return [Setting(window, size) for size in sizes for window in _numbers("windows", windows, 1)]


def _numbers(option: str, text: str, least: int) -> list[int]:
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise OutpaceError(f"--{option} takes numbers, as in 2,4,8; not {text!r}") from None
    if found[0] < least:
        raise OutpaceError(f"--{option} takes numbers of at least {least}; not {found[0]}")
    return found


def run(
    model: Loaded,
    suite: Suite,
    limit: int | None,
    settings: Settings,
    grid: list[Setting],
    from_text: bool,
    batch: int,
    to_json: str | None,
    html: Path | None,
) -> bool:
    """Measure, and write what was found; whether the run was whole.

    Raises:
        OutpaceError: no prompt fits, or the model's work per step is not known.
    """
    work = work_of(model.target)
    fits = fitting(model, suite, settings.max_new_tokens).first(limit)
    groups = -(-len(fits.items) // batch)
    with Interrupt() as interrupt, bar(groups, "groups of prompts") as progress:
        found = measure_scaling(
            model,
            work,
            fits,
            settings,
            grid,
            from_text,
            batch,
            lambda measured: progress.advance(f"{len(grid)} settings"),
            lambda: interrupt.raised,
        )
    show(found, screen.err() if to_json == STANDARD_OUTPUT else screen.out())
    command = shlex.join(["outpace", *sys.argv[1:]])
    facts = {
        "command": command,
        "machine": machine(model.device),
        "model": {"name": model.name, "dtype": model.dtype, "device": model.device},
        "max_new_tokens": settings.max_new_tokens,
        "from_text": from_text,
    }
    text = json.dumps(as_json(found, facts))
    write_results(text, to_json, lambda: page(found, str(model), command), html)
    return found.whole


def show(found: Scaling, console: Console) -> None:
    """The points, and what they say."""
    console.print(f"{found.suite}: {counted(found.prompts)}", style="bold")
    table = Table("W = G", "N", "rows", "FLOPs", "steps", "tau", "law")
    for column in table.columns:
        column.justify = "right"
    table.add_row("", "", "1.0", "1.0 x", str(found.plain_steps), "1.000", "1.000")
    for point in found.points:
        table.add_row(
            str(point.setting.window),
            str(point.setting.ngram),
            f"{point.rows:.1f}",
            f"{point.flops / found.plain_flops:.1f} x",
            str(point.steps),
            f"{point.tau:.3f}",
            f"{found.fit.predict(point.setting):.3f}",
        )
    console.print(table)
    for line in verdict(found):
        console.print(line, soft_wrap=True)
    unequal = [point for point in found.points if not point.equal]
    if unequal:
        line = f"In {len(unequal)} settings an output is not plain decoding's; outpace bench shows where."
        console.print(line, soft_wrap=True)
