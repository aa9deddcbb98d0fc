"""Remarks on the tables of a benchmark, for the terminal and the HTML report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq

from outpace.bench.record import BenchRecord
from outpace.bench.rows import Difference, Row
from outpace.bench.speed import LEAST_GROUPS, ratios
from outpace.bench.statistics import interval

_SHOWN = 5
_ALIKE = 1.1


def remarks(rows: Seq[Row]) -> list[str]:
    """List errors, and outputs that differ from plain decoding's."""
    lines = []
    for row in rows:
        if row.error is not None:
            lines.append(f"{row.label} failed: {row.error}")
        if not row.differences:
            continue
        kept = "" if row.promised else " (not promised to be equal)"
        lines.append(
            f"{row.label}: {row.different} of {row.outputs} outputs differ from plain decoding's{kept}"
        )
        lines += [f"  {described(one)}" for one in row.differences[:_SHOWN]]
        if row.different > _SHOWN:
            lines.append(f"  and {row.different - _SHOWN} more; --json has them all")
    return lines


def totals(rows: Seq[Row]) -> list[str]:
    """List rows whose speed on the median prompt differs from that on all prompts together."""
    lines = []
    for row in rows:
        if row.speed is None:
            continue
        both = row.speed.speedup, row.speed.speedup_total
        if max(both) <= _ALIKE * min(both):
            continue
        median = "prompt" if row.batch == 1 else f"{row.batch} prompts at once"
        lines.append(
            f"{row.label}: {both[0]:.2f} times as fast as plain decoding on the median {median}, "
            f"{both[1]:.2f} times on all together, where those that take long count for more"
        )
    return lines


def verdicts(record: BenchRecord) -> list[str]:
    """State for each suite and batch size which method is the fastest, by how much, and how sure that is.

    A method that failed, that is lossy or that broke its promise is out of the question.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in record.rows:
        groups.setdefault((row.suite, row.batch), []).append(row)
    lines = []
    for (suite, batch), rows in groups.items():
        where = f" on {suite}" + (f", {batch} at once" if batch > 1 else "") if len(groups) > 1 else ""
        lines.append(f"Fastest here{where}: {_fastest(rows, [*record.failed, *record.broken])}.")
    return lines


def _fastest(rows: Seq[Row], wrong: Seq[Row]) -> str:
    right = [row for row in rows if not row.lossy and row not in wrong]
    ranked = [(row, row.speed) for row in right if row.speed is not None]
    ranked.sort(key=lambda each: each[1].speedup, reverse=True)
    plain = rows[0]
    if not ranked or ranked[0][0] is plain:
        return "plain decoding, which no other method beats"
    first, speed = ranked[0]
    line = f"{first.label}, {_times(speed.speedup, speed.interval)} as fast as plain decoding"
    second = next((row for row, _ in ranked[1:] if row is not plain), plain)
    shared = min(len(first.samples), len(second.samples))
    if second is not plain and shared:
        found = ratios(first.samples[:shared], second.samples[:shared])
        span = interval(found) if shared >= LEAST_GROUPS else None
        line += f", {_times(statistics.median(found), span)} as fast as {second.label}"
    return f"{line}; n = {speed.groups}"


def _times(ratio: float, span: tuple[float, float] | None) -> str:
    """A ratio with its interval; one that may be below 1 is called unsure."""
    if span is None:
        return f"{ratio:.2f} times (too few prompts for an interval)"
    return f"{ratio:.2f} times (95% {span[0]:.2f}-{span[1]:.2f}{', unsure' if span[0] <= 1 else ''})"


def described(one: Difference) -> str:
    """Describe the first difference of an output from plain decoding's."""
    apart = "" if one.margin is None else f"; the two best logits there are {one.margin:.2g} apart"
    turn = f", turn {one.turn + 1}" if one.turn else ""
    plain, other = (("the end" if token is None else token) for token in (one.plain, one.other))
    return f"{one.item}{turn}: token {one.index + 1} is {plain} plainly and {other} here{apart}"


def missing(record: BenchRecord) -> str:
    """State that the measurement is incomplete; "" if it is complete."""
    if record.interrupted:
        return "Interrupted: the figures are those of the prompts that every method had decoded."
    return "" if record.whole else "Not everything was measured: see the notes."


def versions(record: BenchRecord) -> list[str]:
    """List the versions in each environment of another library."""
    return [
        f"environment of {library}: " + ", ".join(f"{name} {version}" for name, version in found.items())
        for library, found in record.peers.items()
    ]
