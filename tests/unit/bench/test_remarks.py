"""The verdict of a benchmark, from measurements made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outpace.bench.record import BenchRecord
from outpace.bench.remarks import verdicts
from outpace.bench.rows import Difference, Row
from outpace.bench.speed import Sample, Speed

SURE = (1.9, 2.1)


def row(name: str, seconds: list[float], interval: tuple[float, float] | None = SURE, **more: Any) -> Row:
    """A method with the seconds of each prompt; plain decoding takes 2 of each."""
    times = 2 / sorted(seconds)[len(seconds) // 2]
    number = len(seconds)
    speed = Speed(number, number, 5.0, (4.0, 5.0, 6.0), times, interval, times, 5.0, times, 0.1, 1.5)
    samples = [Sample((str(place),), 10.0, [each]) for place, each in enumerate(seconds)]
    found = Row(
        "some", name, 1, False, "match", True, False, number, speed=speed, samples=samples, equal=True
    )
    return replace(found, **more)


PLAIN = row("none", [2.0] * 9, (1.0, 1.0))


def said(*rows: Row) -> list[str]:
    return verdicts(BenchRecord({}, {"promise": "same tokens"}, {}, "", list(rows)))


def test_the_fastest_is_named_with_its_lead_its_interval_and_the_number_of_prompts() -> None:
    (line,) = said(PLAIN, row("slow", [1.5] * 9), row("fast", [1.0] * 9))
    assert line == (
        "Fastest here: fast, 2.00 times (95% 1.90-2.10) as fast as plain decoding, "
        "1.50 times (95% 1.50-1.50) as fast as slow; n = 9."
    )


def test_what_is_not_sure_is_called_so() -> None:
    mixed = [1.0, 1.0, 1.0, 1.9, 1.9, 0.9, 1.8, 1.9, 0.8]
    (line,) = said(PLAIN, row("fast", [1.0] * 9, (0.9, 2.1)), row("near", mixed))
    assert "fast, 2.00 times (95% 0.90-2.10, unsure) as fast as plain" in line
    assert "unsure) as fast as near" in line
    (line,) = said(row("none", [2.0] * 3), row("few", [1.0] * 3, None))
    assert line == (
        "Fastest here: few, 2.00 times (too few prompts for an interval) as fast as plain decoding; n = 3."
    )


def test_methods_that_are_wrong_lossy_or_slower_do_not_win() -> None:
    wrong = row("wrong", [0.5] * 9, different=1, differences=(Difference("a", 0, 3, 1, 2, 1.0),))
    lossy = row("lossy", [0.4] * 9, lossy=True, promised=False)
    failed = Row("some", "failed", 1, False, "match", True, False, 9, error="no")
    slow = row("slow", [3.0] * 9)
    assert said(PLAIN, wrong, lossy, failed, slow) == [
        "Fastest here: plain decoding, which no other method beats."
    ]
    assert said(PLAIN, wrong, row("right", [1.0] * 9), lossy)[0].startswith("Fastest here: right, 2.00 times")


def test_each_suite_and_batch_has_a_verdict() -> None:
    rows = [
        one for batch in (1, 4) for one in (replace(PLAIN, batch=batch), row("fast", [1.0] * 9, batch=batch))
    ]
    lines = said(*rows)
    assert [line.partition(":")[0] for line in lines] == [
        "Fastest here on some",
        "Fastest here on some, 4 at once",
    ]
    assert said() == []
