"""One method's speed relative to another's, prompt by prompt, from a result of ``outpace bench --json``.

    python benchmarks/paired.py RESULT.json METHOD OVER

METHOD and OVER are names of rows, or how they begin. In a file of several runs the name of a row may state
what distinguishes it, as in "suffix (governed)"; an ambiguous one is refused with a list of the rows. Printed
for each suite: the median over prompts of the ratio of tokens per second, its 95% interval, and the ratio of
all tokens over all seconds.
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


def chosen(rows: dict[str, Row], name: str) -> Row | None:
    """The row with this name, else the only one that begins with it; None if there is none."""
    found = [name] if name in rows else [each for each in rows if each.startswith(name)]
    if len(found) > 1:
        raise OutpaceError(f"several rows begin with {name!r}; name one whole: {'; '.join(found)}")
    return rows[found[0]] if found else None


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    try:
        _, rows = read_rows(Path(sys.argv[1]))
        suites: dict[tuple[str, int], dict[str, Row]] = {}
        for (suite, name, batch), row in rows.items():
            suites.setdefault((suite, batch), {})[name] = row
        pairs = {key: [chosen(found, name) for name in sys.argv[2:]] for key, found in suites.items()}
        for (suite, batch), (one, other) in pairs.items():
            if one is None or other is None:
                print(f"{suite}, batch {batch}: not measured with both")
                continue
            if len(one["samples"]) != len(other["samples"]):
                raise OutpaceError(f"{suite}: these rows are of different prompts; name two of the same run")
            ratios = [
                rate(mine) / rate(its) for mine, its in zip(one["samples"], other["samples"], strict=True)
            ]
            low, high = interval(ratios) or (float("nan"), float("nan"))
            print(
                f"{suite}, batch {batch}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) by "
                f"prompts, {total(one) / total(other):.3f} in all"
            )
        if not any(all(pair) for pair in pairs.values()):
            raise OutpaceError(f"{sys.argv[1]} has no suite with both; its rows: {'; '.join(_names(rows))}")
    except OutpaceError as error:
        raise SystemExit(str(error)) from None


def _names(rows: dict[tuple[str, str, int], Row]) -> list[str]:
    return list(dict.fromkeys(name for _, name, _ in rows))


if __name__ == "__main__":
    main()
