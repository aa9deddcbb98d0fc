"""The share of the roof, from measurements made up so that it can be computed by hand."""

from __future__ import annotations

import pytest

from outpace.bench.items import Item, Suite
from outpace.bench.run import Measured, MethodRuns, Settings
from outpace.bench.runs import MethodRun
from outpace_lab.bench.results import LabRow, lab_rows_of
from outpace_lab.bench.roof import Limits, Roof, Work
from unit.bench.told import Told

TOKENS = [1, 2, 3, 4]


def measured(*runs: MethodRun) -> Measured:
    """Runs of plain decoding and of another method, on a prompt of ten tokens."""
    items = (Item("p", "x", ("one",)),)
    traces = [MethodRuns(Told(name, []), [[[run]]]) for name, run in zip(("none", "a"), runs, strict=True)]
    return Measured(Suite("s", items, "here"), 1, Settings(4), [items], [[[[9] * 10]]], traces)


def rows(found: Measured, roof: Roof | None) -> list[LabRow]:
    return lab_rows_of(found, lambda asked, output: 0.0, roof)


def test_the_share_of_the_roof() -> None:
    work = Work(weight_bytes=1000, row_bytes=10, weight_numbers=100, attention_numbers=1)
    more = {"steps": 2, "forwards": 2, "drafted": 6, "draft_seconds": 0.0, "verify_seconds": 0.5}
    plain = MethodRun([TOKENS], 4.5, 0.5, 1, forwards=4, steps=4, drafted=0, accepted=0)
    found = measured(plain, MethodRun([TOKENS], 1.5, 0.5, 1, **more))
    # The mean step: 4 rows after 10 prompt tokens and half of the 4 written.
    moved, operations = 1000 + 12 * 10, 2 * 4 * (100 + 12 * 1)
    by_memory = rows(found, Roof(work, Limits(10_000, 0, 10_000), (), 1))[1].roof
    assert by_memory is not None and by_memory.bound_by == "memory"
    assert (by_memory.bytes_per_step, by_memory.operations_per_step) == (moved, operations)
    assert by_memory.least_milliseconds == pytest.approx(1000 * moved / 10_000)
    assert by_memory.share == pytest.approx(moved / 10_000 / 0.5)
    by_arithmetic = rows(found, Roof(work, Limits(10_000, 0, 1_000), (), 1))[1].roof
    assert by_arithmetic is not None and by_arithmetic.bound_by == "arithmetic"
    assert by_arithmetic.least_milliseconds == pytest.approx(1000 * operations / 1_000)
    assert rows(found, Roof(None, Limits(10_000, 0, 10_000), (), 1))[1].roof is None
    assert rows(found, None)[1].roof is None
    found.traces[1].method.peer = True
    assert rows(found, Roof(work, Limits(10_000, 0, 10_000), (), 1))[1].roof is None
