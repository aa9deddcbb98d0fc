"""The report on the scaling law, as JSON and as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from typing import Any

from outpace.bench import plots
from outpace.bench.items import counted
from outpace.bench.lab.scaling import Line, Scaling
from outpace.bench.markup import frame, plot, table
from outpace.bench.rows import number


def verdict(found: Scaling) -> list[str]:
    """What was found, in words: the fit, and for each N whether steps fall on a line."""
    fit = found.fit
    lines = [
        f"The law fits with a = {fit.acceptance:.3f} and f = {fit.every:.2f}: the root mean squared error of "
        f"tokens per step is {fit.error:.1%} over {len(found.points)} settings."
    ]
    return lines + [_told(line) for line in found.lines]


def _told(line: Line) -> str:
    falls = (
        f"each doubling of the FLOPs saves {-line.slope:.1%} of plain decoding's steps"
        if line.slope < 0
        else "more FLOPs save no steps"
    )
    return (
        f"N = {line.ngram}: {falls}; a line explains {line.r2:.1%} of it. In the cheaper half of the "
        f"windows it is {-line.first_half:.1%}, in the dearer half {-line.second_half:.1%}."
    )


def as_json(found: Scaling, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One object, with the facts of the run beside what was found."""
    return {
        "format": "outpace bench scaling",
        "version": 1,
        **facts,
        **asdict(found),
        "points": [
            {
                **{name: value for name, value in asdict(point).items() if name != "setting"},
                "window": point.setting.window,
                "ngram": point.setting.ngram,
                "guesses": point.setting.window,
                "predicted_tau": found.fit.predict(point.setting),
            }
            for point in found.points
        ],
    }


def page(found: Scaling, model: str, command: str) -> str:
    """The report.

    Raises:
        OutpaceError: matplotlib is not installed.
    """
    plots.check_installed()
    head = ["W = G", "N", "rows", "FLOPs", "steps", "tokens per step", "the law"]
    ordered = sorted(found.points, key=lambda point: (point.setting.ngram, point.flops))
    rows = [
        [
            str(point.setting.window),
            str(point.setting.ngram),
            number(point.rows, 1),
            f"{point.flops / found.plain_flops:.1f} x",
            str(point.steps),
            number(point.tau, 3),
            number(found.fit.predict(point.setting), 3),
        ]
        for point in ordered
    ]
    lines = [
        [str(one.ngram), *(f"{x:.1%}" for x in (one.slope, one.r2, one.first_half, one.second_half))]
        for one in found.lines
    ]
    told = verdict(found)
    return frame(
        f"Scaling of lookahead decoding: {model}",
        "\n".join(
            [
                f"<h1>The scaling law of lookahead decoding on {escape(model)}</h1>",
                f"<p>{escape(found.suite)}, {counted(found.prompts)}, {found.plain_steps} plain steps. "
                f"{escape(command)}</p>",
                "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in told) + "</ul>",
                plot(
                    plots.scaling_compression(found),
                    f"Tokens per step over the logarithm of FLOPs per step, measured and fitted. {told[0]}",
                    "Points are measured; dashed lines are what the law predicts with the fitted numbers.",
                    table("Each setting; FLOPs in those of a plain step.", head, rows),
                ),
                plot(
                    plots.scaling_steps(found),
                    "Steps over the logarithm of FLOPs per step. " + " ".join(told[1:]),
                    "If steps fall linearly in the logarithm of the FLOPs, points of one N lie on a line.",
                    table(
                        "What doubling the FLOPs changes, as a share of plain decoding's steps.",
                        ["N", "slope", "R squared", "cheaper half", "dearer half"],
                        lines,
                    ),
                ),
            ]
        ),
    )
