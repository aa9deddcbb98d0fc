"""Remarks on the tables of a benchmark, for the terminal and the HTML report."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.bench.record import Record
from outpace.bench.rows import Difference, Row

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


def described(one: Difference) -> str:
    """Describe the first difference of an output from plain decoding's."""
    apart = "" if one.margin is None else f"; the two best logits there are {one.margin:.2g} apart"
    turn = f", turn {one.turn + 1}" if one.turn else ""
    plain, other = (("the end" if token is None else token) for token in (one.plain, one.other))
    return f"{one.item}{turn}: token {one.index + 1} is {plain} plainly and {other} here{apart}"


def missing(record: Record) -> str:
    """State that the measurement is incomplete; "" if it is complete."""
    if record.interrupted:
        return "Interrupted: the figures are those of the prompts that every method had decoded."
    return "" if record.whole else "Not everything was measured: see the notes."


def versions(record: Record) -> list[str]:
    """List the versions in each environment of another library."""
    return [
        f"environment of {library}: " + ", ".join(f"{name} {version}" for name, version in found.items())
        for library, found in record.peers.items()
    ]
