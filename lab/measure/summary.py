"""A result of ``outpace bench --json`` as a table for a document: methods by suites.

    python lab/measure/summary.py RESULT.json

A cell has the speed relative to plain decoding with its 95% interval, and tokens per step; for plain
decoding, tokens per second. Outputs that differ from plain decoding's are counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from outpace.bench.record import read_rows
from outpace.core import OutpaceError

PLAIN = "none"


def cell(row: dict[str, Any]) -> str:
    if row["error"] is not None or row["speedup"] is None:
        return "failed"
    if row["drafter"] == PLAIN:
        return f"{row['tokens_per_second']:.0f} tokens/s"
    interval = row["speedup_interval"]
    between = "" if interval is None else " ({:.2f} to {:.2f})".format(*interval)
    different = f", {row['different']} of {row['outputs']} differ" if row["different"] else ""
    tau = "" if row["tau"] is None else f", {row['tau']:.2f}"
    return f"{row['speedup']:.2f} x{between}{tau}{different}"


def label(name: str, row: dict[str, Any]) -> str:
    """The drafter, and what distinguishes its rows in a file of several runs."""
    differing = name.removeprefix(row["drafter"])
    governed = ", governed" if row.get("adaptive") and "governed" not in differing else ""
    verifier = f", **lossy** {row['verifier']}" if row["lossy"] and row["verifier"] not in differing else ""
    return f"`{row['drafter']}`{differing}{governed}{verifier}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    try:
        _, rows = read_rows(parser.parse_args().result)
    except OutpaceError as error:
        raise SystemExit(str(error)) from None
    columns = list(dict.fromkeys((suite, batch) for suite, _, batch in rows))
    methods = {name: label(name, row) for (_, name, _), row in rows.items()}
    heads = [suite if batch == 1 else f"{suite}, {batch} at once" for suite, batch in columns]
    print(f"| method | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}")
    for name, method in methods.items():
        found = [rows.get((suite, name, batch)) for suite, batch in columns]
        print(f"| {method} | " + " | ".join("" if row is None else cell(row) for row in found) + " |")


if __name__ == "__main__":
    main()
