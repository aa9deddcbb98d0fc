"""One method's speed relative to another's, prompt by prompt, from a result of ``outpace bench --json``.

    python benchmarks/paired.py RESULT.json METHOD OVER

METHOD and OVER are prefixes of row names. Printed for each suite: the median over prompts of the ratio of
tokens per second, its 95% interval, and the ratio of all tokens over all seconds.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from outpace.bench.record import read_rows
from outpace.bench.statistics import interval
from outpace.core import OutpaceError

Row = dict[str, Any]


def rate(sample: Row) -> float:
    return float(sample["tokens"] / statistics.median(sample["seconds"]))


def total(row: Row) -> float:
    seconds = sum(statistics.median(sample["seconds"]) for sample in row["samples"])
    return float(sum(sample["tokens"] for sample in row["samples"]) / seconds)


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    try:
        _, rows = read_rows(Path(sys.argv[1]))
    except OutpaceError as error:
        raise SystemExit(str(error)) from None
    found: dict[tuple[str, int], list[Row]] = {}
    for name in sys.argv[2:]:
        for (suite, drafter, batch), row in rows.items():
            if drafter.startswith(name):
                found.setdefault((suite, batch), []).append(row)
    for (suite, batch), pair in found.items():
        if len(pair) != 2:
            raise SystemExit(
                f"{suite}: {len(pair)} rows begin with {sys.argv[2]!r} or {sys.argv[3]!r}, not 2"
            )
        one, other = pair
        ratios = [rate(mine) / rate(its) for mine, its in zip(one["samples"], other["samples"], strict=True)]
        low, high = interval(ratios) or (float("nan"), float("nan"))
        print(
            f"{suite}, batch {batch}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) by prompts, "
            f"{total(one) / total(other):.3f} in all"
        )


if __name__ == "__main__":
    main()
