"""Rows and records of a benchmark with the machine's roof and the grades of answers."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from outpace.bench import record as records
from outpace.bench.record import BenchRecord
from outpace.bench.rows import Margin, Row, rows_of
from outpace.bench.run import Measured, MethodRuns
from outpace_lab.bench.grading import Grader, Quality, quality_of
from outpace_lab.bench.roof import Roof


@dataclass(frozen=True)
class Reached:
    """Lower bound of the time of the target's forward in a mean step, and its share of the measured time."""

    bytes_per_step: float
    operations_per_step: float
    least_milliseconds: float
    bound_by: str
    share: float


@dataclass(frozen=True)
class LabRow(Row):
    """A row with its share of the roof and its grades.

    Attributes:
        roof: None if unknown.
        quality: grades of the answers of the first repeat, by what was graded; empty if nothing was.
    """

    roof: Reached | None = None
    quality: tuple[Quality, ...] = ()


@dataclass
class LabRecord(BenchRecord):
    """A record with the roof of the machine and the model; None if unknown. Its rows are ``LabRow``."""

    roof: Roof | None = None


def as_json(record: LabRecord) -> dict[str, Any]:
    """Convert to one JSON object, as a record without a roof is."""
    return {**records.as_json(record), "roof": None if record.roof is None else asdict(record.roof)}


def lab_rows_of(
    measured: Measured, margin: Margin, roof: Roof | None, grader: Grader | None = None
) -> list[LabRow]:
    """Compute a row per method, plain decoding first.

    Args:
        margin: as for ``rows_of``.
        roof: the roof of the machine and the model; None if unknown.
        grader: grades the answers to the prompts that have an expected one; None grades none.
    """
    found = []
    for row, trace in zip(rows_of(measured, margin), measured.traces, strict=True):
        known = row.error is None and bool(row.outputs)
        reached = _reached(measured, row, trace, roof) if known and roof is not None else None
        quality = _quality(measured, trace, grader) if known and grader is not None else ()
        found.append(LabRow(**vars(row), roof=reached, quality=quality))
    return found


def _reached(measured: Measured, row: Row, trace: MethodRuns, roof: Roof) -> Reached | None:
    """Compare the lower bound of the mean step's time with the time of its forward."""
    runs, per_step = trace.all_runs, row.milliseconds_per_step
    forwards = sum(run.forwards or 0 for run in runs)
    if row.peer or roof.work is None or per_step is None or not per_step.verify or not forwards:
        return None
    rows = sum((run.steps or 0) + (run.drafted or 0) for run in runs) / forwards
    sequences = sum(run.steps or 0 for run in runs) / forwards
    asked = [len(prompt) for group in measured.prompts for turn in group for prompt in turn]
    written = sum(run.tokens for run in runs) / sum(len(run.outputs) for run in runs)
    context = statistics.fmean(asked) + written / 2
    moved = roof.work.bytes(sequences, context)
    operations = roof.work.operations(rows, context)
    least = 1000 * roof.limits.seconds(moved, operations)
    memory = moved / roof.limits.bandwidth >= operations / roof.limits.operations
    bound = "memory" if memory else "arithmetic"
    return Reached(moved, operations, least, bound, least / per_step.verify)


def _quality(measured: Measured, trace: MethodRuns, grader: Grader) -> tuple[Quality, ...]:
    """Grade the first turns of the first repeat, and plain decoding's of the same prompts."""
    grades: dict[str, list[tuple[float, float]]] = {}
    for place, repeats in enumerate(trace.runs):
        plain = measured.traces[0].runs[place][0][0]
        for number, item in enumerate(measured.taking_part(place, 0)):
            own = grader(item, repeats[0][0].outputs[number])
            base = grader(item, plain.outputs[number])
            if item.expected is not None and own is not None and base is not None:
                grades.setdefault(item.expected.kind, []).append((own, base))
    return tuple(
        quality_of(kind, [own for own, _ in pairs], [base for _, base in pairs])
        for kind, pairs in sorted(grades.items())
    )
