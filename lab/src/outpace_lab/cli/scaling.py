"""``outpace bench scaling``: the scaling law of lookahead decoding on a user's model and prompts."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from outpace.cli import options as o
from outpace.cli import screen
from outpace.cli.app import benchmarks, finish, guarded
from outpace.cli.interrupt import Interrupt
from outpace.cli.parts import ModelSource, check_length, check_listed, numbers
from outpace.cli.progress import bar
from outpace.cli.writer import STANDARD_OUTPUT
from outpace_lab.cli.options import Html
from outpace_lab.cli.reports import check_outputs, write_results

if TYPE_CHECKING:
    from outpace_lab.bench.scaling import Scaling

Windows = Annotated[str, o.method_option("--windows", metavar="LIST", help="Window sizes W; G = W.")]
Ngrams = Annotated[str, o.method_option("--ngrams", metavar="LIST", help="N.")]
FromText = Annotated[
    bool,
    o.method_option(
        "--from-text", help="Fill the pool from prompt and output too, not only from the window."
    ),
]
ScalingBatch = Annotated[
    int, o.method_option("--batch", metavar="N", help="Prompts decoded together.", min=1)
]


@benchmarks.command(
    "scaling", epilog="Example: outpace bench scaling --suite gsm8k --limit 20 --html law.html"
)
@guarded
def scaling_law(
    suite: o.Suites = "builtin",
    data: o.Data = None,
    limit: o.Limit = 14,
    windows: Windows = "1,2,4,8,16",
    ngrams: Ngrams = "3,4,5,6",
    from_text: FromText = False,
    batch: ScalingBatch = 1,
    model: o.ModelName = None,
    device: o.Device = None,
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    trust_remote_code: o.Trust = False,
    max_new_tokens: o.MaxNewTokens = 64,
    json_to: o.JsonTo = None,
    html: Html = None,
) -> None:
    """Measure steps of lookahead decoding by window and n-gram size, against FLOPs per step.

    Fits the law of Fu et al. 2024, section 4, to the measurements, and reports
    the error of the fit and whether steps fall linearly in log FLOPs.
    """
    check_length(max_new_tokens)
    check_listed(suite, "")
    check_outputs(json_to, html)
    source = ModelSource(model, device, dtype, trust_remote_code)
    source.check_names()
    sizes, widths = sorted(numbers("ngrams", ngrams, least=2)), sorted(numbers("windows", windows))
    with screen.busy("reading the prompts ..."):
        from outpace.bench.machine import machine
        from outpace.bench.run import Settings
        from outpace.bench.subject import fitting
        from outpace.bench.suites import load_together
        from outpace_lab.bench.roof import work_of
        from outpace_lab.bench.scaling import Setting, measure_scaling
        from outpace_lab.bench.scaling_page import as_json, page

        grid = [Setting(window, size) for size in sizes for window in widths]
        prompts = load_together(suite, data)
    loaded = source.load()
    work = work_of(loaded.target)
    deepest = max(setting.depth for setting in grid)
    fits = fitting(loaded, prompts, max_new_tokens + deepest).first(limit)
    groups = -(-len(fits.items) // batch)
    with Interrupt() as interrupt, bar(groups, "groups of prompts") as progress:
        found = measure_scaling(
            loaded,
            work,
            fits,
            Settings(max_new_tokens),
            grid,
            from_text,
            batch,
            lambda measured: progress.advance(f"{len(grid)} settings"),
            lambda: interrupt.raised,
        )
    show_points(found, screen.err() if json_to == STANDARD_OUTPUT else screen.out())
    command = shlex.join(["outpace", *sys.argv[1:]])
    facts = {
        "command": command,
        "machine": machine(loaded.device),
        "model": {"name": loaded.name, "dtype": loaded.dtype, "device": loaded.device},
        "max_new_tokens": max_new_tokens,
        "from_text": from_text,
    }
    text = json.dumps(as_json(found, facts))
    write_results(text, json_to, lambda: page(found, str(loaded), command), html)
    finish(found.whole)


def show_points(found: Scaling, console: Console) -> None:
    """Print the points and the fit."""
    from outpace.bench.items import counted
    from outpace_lab.bench.scaling_page import verdict

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
