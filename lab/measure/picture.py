"""Speed by method as one SVG, from a result of ``outpace bench --json``; or a scaling law's tau.

    python lab/measure/picture.py benchmarks/RESULT.json --out docs/images/speed.svg
    python lab/measure/picture.py benchmarks/SCALING.json ... --law --out docs/images/scaling.svg

Each panel is a suite, or with ``--categories SUITE`` a category of its prompts; each bar is a method's speed
relative to plain decoding, with its 95% interval. With ``--law`` each panel is a result of ``outpace bench
scaling``, and shows tokens per step (tau) by the floating point operations of a step, a line per N. The
background is transparent and all text a grey that is legible on white and on black. The output is
deterministic.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outpace.bench.methods import split_drafters
from outpace.bench.record import read_rows

# Drawn without --methods, as far as a result has them.
METHODS = (
    "combined:(suffix)+(token_recycling)",
    "suffix",
    "prompt_lookup",
    "token_recycling",
    "lookahead",
    "transformers:prompt_lookup",
    "transformers:plain",
)
Rows = dict[tuple[str, str, int], dict[str, Any]]

INK = "#7d8590"  # at least 3.7 to 1 on white and on black
OURS, PEER = "#0a84d6", "#d9822b"
PER_N = (OURS, PEER, "#2da44e", "#a371f7", "#db61a2")
LAW = "outpace bench scaling"  # the format of its results
STYLE = {
    "svg.fonttype": "path",  # text as paths, which look the same everywhere
    "svg.hashsalt": "outpace",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw(axes: Axes, suite: str, rows: list[dict[str, Any]]) -> None:
    """Draw one panel, the first method at the top."""
    speeds = [row["speedup"] for row in rows]
    spans = [row["speedup_interval"] or (row["speedup"],) * 2 for row in rows]
    errors = [
        [speed - low for speed, (low, _) in zip(speeds, spans, strict=True)],
        [high - speed for speed, (_, high) in zip(speeds, spans, strict=True)],
    ]
    colours = [PEER if row["peer"] else OURS for row in rows]
    axes.barh(range(len(rows)), speeds, 0.7, xerr=errors, color=colours, error_kw={"ecolor": INK, "lw": 1})
    for place, speed in enumerate(speeds):
        axes.text(0.06, place, f"{speed:.2f}", va="center", color="white", fontsize=9, fontweight="bold")
    axes.axvline(1, color=INK, lw=1, ls="--")
    axes.set_title(suite, fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def by_category(rows: Rows, suite: str) -> Rows:
    """The rows of a suite, once per category of its prompts, with the category in the suite's place."""
    return {
        (category, method, batch): {**row, "speedup": speed["speedup"], "speedup_interval": speed["interval"]}
        for (own, method, batch), row in rows.items()
        if own == suite
        for category, speed in (row["categories"] or {}).items()
    }


def label(method: str) -> str:
    """A short name: values without the options' names, parts without ``combined``."""
    if method.startswith("transformers:"):
        return method.replace(":", ": ")
    values = re.sub(r":?\b\w+=", " ", method.removeprefix("combined:"))
    return re.sub("[():]", "", values).replace("+", " + ")


def picture(file: Path, methods: list[str] | None, out: Path, categories: str | None = None) -> None:
    """Write the SVG; ``methods`` None means those of ``METHODS`` that the file has in each suite.

    Raises:
        OutpaceError: the file is not a benchmark. SystemExit: it lacks one of the methods in a suite, or all.
    """
    found, rows = read_rows(file)
    if categories is not None:
        rows = by_category(rows, categories)
    suites = list(dict.fromkeys(suite for suite, _, batch in rows if batch == 1))
    lacking = [
        method
        for method in methods or METHODS
        if not all(_speed(rows.get((suite, method, 1))) for suite in suites)
    ]
    if methods is None:
        methods = [method for method in METHODS if method not in lacking]
    elif lacking:
        raise SystemExit(f"{file} has no speed of {lacking[0]}")
    if not suites or not methods:
        names = "; ".join(dict.fromkeys(name for _, name, _ in rows)) or "nothing"
        raise SystemExit(f"{file} has nothing to draw; --methods takes names of its rows, which are {names}")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 0.9 + 0.34 * len(methods)), layout="constrained")
        panels = figure.subplots(1, len(suites), sharex=True, sharey=True, squeeze=False)[0]
        for axes, suite in zip(panels, suites, strict=True):
            draw(axes, suite, [rows[suite, method, 1] for method in methods])
        panels[0].set_yticks(range(len(methods)), [label(method) for method in methods])
        panels[0].invert_yaxis()
        model, threads = found["model"], found["machine"]["threads"]
        spans = any(rows[suite, method, 1]["speedup_interval"] for suite in suites for method in methods)
        figure.supxlabel(
            f"times plain decoding's speed: {model['name']}, {model['dtype']}, "
            f"{threads} thread{'s' * (threads > 1)}" + "; lines are 95% intervals" * spans,
            fontsize=9,
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})


def law(files: list[Path], out: Path) -> None:
    """Write the SVG of scaling laws: a panel per file.

    Raises:
        SystemExit: a file is not a result of ``outpace bench scaling``.
    """
    results = [json.loads(file.read_text("utf-8")) for file in files]
    for file, result in zip(files, results, strict=True):
        if not isinstance(result, dict) or result.get("format") != LAW:
            raise SystemExit(f"{file} is no result of {LAW} --json")
    ngrams = sorted({point["ngram"] for result in results for point in result["points"]})
    colours = {ngram: PER_N[place % len(PER_N)] for place, ngram in enumerate(ngrams)}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.8 * len(files), 3.4), layout="constrained")
        panels = figure.subplots(1, len(files), sharey=True, squeeze=False)[0]
        for axes, result in zip(panels, results, strict=True):
            _draw_law(axes, result, colours)
        panels[0].set_ylabel("tokens per step (tau)")
        figure.supxlabel("floating point operations of a step, times plain decoding's", fontsize=9)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})


def _draw_law(axes: Axes, result: dict[str, Any], colours: dict[int, str]) -> None:
    """Draw measured tau as dots on a line per N, and the fitted law's as a dashed one."""
    for ngram in sorted({point["ngram"] for point in result["points"]}):
        colour = colours[ngram]
        points = sorted((p for p in result["points"] if p["ngram"] == ngram), key=lambda p: p["flops"])
        costs = [point["flops"] / result["plain_flops"] for point in points]
        axes.plot(costs, [p["tau"] for p in points], "o-", color=colour, ms=4, lw=1.5, label=f"N = {ngram}")
        axes.plot(costs, [p["predicted_tau"] for p in points], "--", color=colour, lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_title(f"{result['model']['name']}, {result['suite']}", fontsize=11)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)


def _speed(row: dict[str, Any] | None) -> float | None:
    return None if row is None else row["speedup"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("result", type=Path, nargs="+")
    parser.add_argument("--law", action="store_true", help="results of outpace bench scaling, a panel each")
    parser.add_argument("--methods", help="comma-separated names of rows, top to bottom")
    parser.add_argument("--categories", metavar="SUITE", help="one panel per category of this suite")
    parser.add_argument("--out", type=Path, default=Path("docs/images/speed.svg"))
    options = parser.parse_args()
    if options.law:
        return law(options.result, options.out)
    if len(options.result) > 1:
        parser.error("several results are for --law")
    methods = split_drafters(options.methods)[1:] if options.methods else None
    picture(options.result[0], methods, options.out, options.categories)


if __name__ == "__main__":
    main()
