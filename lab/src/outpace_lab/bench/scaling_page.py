"""The report on the scaling law, as JSON and as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outpace_lab.bench.html import render
from outpace_lab.bench.scaling import Line, Scaling


def verdict(found: Scaling) -> list[str]:
    """Describe the fit, and for each N how well a line fits the steps."""
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
        f"windows it is {-line.first_half:.1%}, in the more expensive half {-line.second_half:.1%}."
    )


def as_json(found: Scaling, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to one JSON object, including the facts of the run."""
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
    """Write the report.

    Raises:
        OutpaceError: matplotlib or jinja2 is not installed.
    """
    return render("scaling", found=found, verdict=verdict(found), model=model, command=command)
