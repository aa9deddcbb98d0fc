"""One method's speed relative to another's, prompt by prompt, from a result of ``outpace bench --json``.

    python lab/measure/paired.py RESULT.json METHOD OVER

METHOD and OVER are names of rows, or how they begin. In a file of several runs the name of a row may state
what distinguishes it, as in "suffix (governed)"; an ambiguous one is refused with a list of the rows. Printed
for each suite: the median over prompts of the ratio of tokens per second, and the ratio of all tokens over
all seconds, each with its 95% interval.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from outpace.bench.record import read_rows
from outpace.bench.statistics import interval, interval_of_rates
from outpace.core import OutpaceError

Row = dict[str, Any]


def timed(row: Row) -> list[tuple[float, float]]:
    """Tokens and seconds of each prompt."""
    return [(sample["tokens"], statistics.median(sample["seconds"])) for sample in row["samples"]]


def total(samples: list[tuple[float, float]]) -> float:
    tokens, seconds = map(sum, zip(*samples, strict=True))
    return tokens / seconds


def chosen(rows: dict[str, Row], name: str) -> Row | None:
    """The row with this name, else the only one that begins with it; None if there is none."""
    found = [name] if name in rows else [each for each in rows if each.startswith(name)]
    if len(found) > 1:
        raise OutpaceError(f"several rows begin with {name!r}; name one whole: {'; '.join(found)}")
    return rows[found[0]] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("method")
    parser.add_argument("over")
    given = parser.parse_args()
    try:
        _, rows = read_rows(given.result)
        suites: dict[tuple[str, int], dict[str, Row]] = {}
        for (suite, name, batch), row in rows.items():
            suites.setdefault((suite, batch), {})[name] = row
        pairs = {
            key: [chosen(found, name) for name in (given.method, given.over)] for key, found in suites.items()
        }
        for (suite, batch), (one, other) in pairs.items():
            if one is None or other is None:
                print(f"{suite}, batch {batch}: not measured with both")
                continue
            if len(one["samples"]) != len(other["samples"]):
                raise OutpaceError(f"{suite}: these rows are of different prompts; name two of the same run")
            mine, theirs = timed(one), timed(other)
            ratios = [ours[0] / ours[1] * its[1] / its[0] for ours, its in zip(mine, theirs, strict=True)]
            by_prompts = f"{statistics.median(ratios):.3f}{_told(interval(ratios))} by prompts"
            in_all = f"{total(mine) / total(theirs):.3f}{_told(interval_of_rates(mine, theirs))} in all"
            print(f"{suite}, batch {batch}: {by_prompts}, {in_all}")
        if not any(all(pair) for pair in pairs.values()):
            raise OutpaceError(f"{given.result} has no suite with both; its rows: {'; '.join(_names(rows))}")
    except OutpaceError as error:
        raise SystemExit(str(error)) from None


def _told(between: tuple[float, float] | None) -> str:
    return "" if between is None else " ({:.3f} to {:.3f})".format(*between)


def _names(rows: dict[tuple[str, str, int], Row]) -> list[str]:
    return list(dict.fromkeys(name for _, name, _ in rows))


if __name__ == "__main__":
    main()
