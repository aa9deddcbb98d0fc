"""The plots of the report, each as an SVG image, by matplotlib."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from outpace.bench.rows import Row
from outpace.bench.runs import BASELINE
from outpace_lab.bench.results import LabRow
from outpace_lab.bench.roof import Roof
from outpace_lab.bench.scaling import Point, Scaling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, distinguishable with any kind of colour vision; black is plain decoding.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
_MARKERS = "osD^vP*X"
# From the ninth method on, colours repeat with the next line style and hatch.
_LINES = ("-", "--", ":")
_HATCHES = ("", "///", "...")
_WIDTH, _HEIGHT = 5.8, 3.8  # inches, so that the text matches the page's size
_FLOPS = "FLOPs of a step, in those of a plain step"


def speed_by_category(rows: Seq[Row], suite: str) -> str:
    """Bars of the speedup over plain decoding, grouped by category, with 95% intervals."""
    shown = [(place, row) for place, row in enumerate(rows) if row.speed and row.drafter != BASELINE]
    first = next((row for row in rows if row.categories), None)
    names = [*first.categories] if first is not None and len(first.categories) > 1 else []
    places = ["all", *names]
    wide = max(_WIDTH, 0.14 * len(places) * max(1, len(shown)))
    axes, save = _figure(
        f"Speed by category: {suite}",
        "category of prompts",
        "times plain decoding's speed",
        (wide, max(_HEIGHT, 0.5 * wide)),
    )
    width = 0.8 / max(1, len(shown))
    for number, (look, row) in enumerate(shown):
        speeds = [row.speed, *(row.categories[name] for name in names)]
        left = [place - 0.4 + (number + 0.5) * width for place in range(len(places))]
        heights = [speed.speedup for speed in speeds if speed is not None]
        spans = [speed.interval or (speed.speedup, speed.speedup) for speed in speeds if speed is not None]
        errors = [
            [max(0.0, height - low) for height, (low, _) in zip(heights, spans, strict=True)],
            [max(0.0, high - height) for height, (_, high) in zip(heights, spans, strict=True)],
        ]
        filled = {"color": _look(look)["color"], "hatch": _HATCHES[look // len(_COLOURS) % len(_HATCHES)]}
        axes.bar(
            left,
            heights,
            width,
            yerr=errors,
            label=row.label,
            edgecolor="white",
            lw=0,
            error_kw={"lw": 1},
            **filled,
        )
    axes.axhline(1, color=_COLOURS[0], lw=1, ls="--", label="none (plain decoding)")
    turned: dict[str, Any] = (
        {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if len(places) > 5 else {}
    )
    axes.set_xticks(range(len(places)), places, **turned)
    return save()


def acceptance_by_depth(rows: Seq[Row], suite: str) -> str:
    """Lines: the share of steps that accepted a token at each depth of the draft."""
    axes, save = _figure(
        f"Acceptance by depth: {suite}",
        "place in the draft (1 is the next token)",
        "share of steps that accepted it",
    )
    for number, row in enumerate(rows):
        shares = row.acceptance_by_position
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, label=row.label, **_look(number))
    axes.set_ylim(0, 1)
    axes.locator_params(axis="x", integer=True)
    return save()


def time_by_width(roof: Roof) -> str:
    """Lines: milliseconds of a forward by its rows, measured, and the lower bound if known."""
    axes, save = _figure(
        "Step time by width", "tokens in one forward (1 is plain decoding)", "milliseconds of a forward"
    )
    rows = [width.rows for width in roof.widths]
    axes.plot(rows, [1000 * width.seconds for width in roof.widths], label="measured", **_look(1))
    least = [1000 * width.least for width in roof.widths if width.least is not None]
    if least:
        axes.plot(rows, least, label="least possible", **_look(0))
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(row) for row in rows])
    axes.set_ylim(bottom=0)
    return save()


def roofline(rows: Seq[LabRow], roof: Roof) -> str:
    """Operations per second over operations per byte: the roof, forwards by width, each method's mean step.

    Requires a roof whose ``work`` is known.
    """
    axes, save = _figure(
        "Roofline of the mean step", "operations per byte moved", "billion operations per second"
    )
    limits, work = roof.limits, roof.work
    assert work is not None
    ridge = limits.operations / limits.bandwidth
    widths = [
        (work.operations(width.rows, roof.context), work.bytes(1, roof.context), width.seconds)
        for width in roof.widths
    ]
    reached = [
        (row, row.roof, row.milliseconds_per_step.verify / 1000)
        for row in rows
        if row.roof is not None and row.milliseconds_per_step is not None and row.milliseconds_per_step.verify
    ]
    places = [operations / moved for operations, moved, _ in widths]
    places += [one.operations_per_step / one.bytes_per_step for _, one, _ in reached]
    ends = [min([*places, ridge]) / 2, ridge, max([*places, ridge]) * 2]
    axes.plot(
        ends,
        [min(limits.operations, limits.bandwidth * x) / 1e9 for x in ends],
        color=_COLOURS[0],
        label="the roof: memory, then arithmetic",
    )
    axes.plot(
        [operations / moved for operations, moved, _ in widths],
        [operations / seconds / 1e9 for operations, _, seconds in widths],
        ls=":",
        marker=".",
        color="#777777",
        label="forwards of 1 to 128 tokens",
    )
    several = len({row.suite for row, _, _ in reached}) > 1
    for number, (row, one, seconds) in enumerate(reached):
        x, y = one.operations_per_step / one.bytes_per_step, one.operations_per_step / seconds / 1e9
        axes.plot([x], [y], **{**_look(number), "ls": "", "ms": 8}, label=_label(row, several))
    axes.set_xscale("log")
    axes.set_yscale("log")
    return save()


def scaling_compression(found: Scaling) -> str:
    """Tokens per step over the FLOPs of a step, per N: measured points, and the fitted law."""
    axes, save = _figure("The scaling law of lookahead decoding", _FLOPS, "tokens per step", (_WIDTH, 4.4))
    for number, (ngram, points, x) in enumerate(_by_ngram(found)):
        look = _look(number + 1)
        axes.plot(x, [point.tau for point in points], **{**look, "ls": ""}, label=f"N = {ngram}, measured")
        law = [found.fit.predict(point.setting) for point in points]
        axes.plot(x, law, color=look["color"], ls="--", label=f"N = {ngram}, the fitted law")
    axes.set_xscale("log", base=2)
    return save()


def scaling_steps(found: Scaling) -> str:
    """Steps, relative to plain decoding's, over the FLOPs of a step: on a line if the claim holds."""
    axes, save = _figure(
        "Steps over the logarithm of the FLOPs per step", _FLOPS, "steps, in plain decoding's", (_WIDTH, 4.4)
    )
    for number, (ngram, points, x) in enumerate(_by_ngram(found)):
        axes.plot(x, [p.steps / found.plain_steps for p in points], label=f"N = {ngram}", **_look(number + 1))
    axes.axhline(1, color=_COLOURS[0], lw=1, ls="--", label="plain decoding")
    axes.set_xscale("log", base=2)
    return save()


def _by_ngram(found: Scaling) -> Iterator[tuple[int, list[Point], list[float]]]:
    """Yield each N, its points, and the FLOPs of their steps relative to a plain step's."""
    for size in sorted({point.setting.ngram for point in found.points}):
        points = [point for point in found.points if point.setting.ngram == size]
        points.sort(key=lambda point: point.flops)
        yield size, points, [point.flops / found.plain_flops for point in points]


def _label(row: Row, several: bool) -> str:
    """Label a row with its batch size, and with its suite if there are ``several``."""
    parts = [row.suite] * several + [row.label] + [f"{row.batch} at once"] * (row.batch > 1)
    return ", ".join(parts)


def _look(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "ls": _LINES[number // len(_COLOURS) % len(_LINES)],
        "ms": 5,
        "lw": 1.5,
    }


def _figure(
    title: str, x: str, y: str, size: tuple[float, float] = (_WIDTH, _HEIGHT)
) -> tuple[Axes, Callable[[], str]]:
    """Make axes with labels, and a function that returns the figure as a data URI."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)

    def save() -> str:
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=2 if size[0] < 8 else 4,
                frameon=False,
                fontsize=9,
            )
        written = io.BytesIO()
        # Text as paths looks the same everywhere; without a date, equal data give an identical file.
        with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "outpace"}):
            figure.savefig(written, format="svg", metadata={"Date": None})
        return "data:image/svg+xml;base64," + base64.b64encode(written.getvalue()).decode()

    return axes, save
