"""The table of docs/concepts/exactness.md is the tool's, and the promises in it were kept."""

from __future__ import annotations

import exactness
from outpace.core import PROMISES
from test_documents import PAGE

_STRICT = ("same bits", "same tokens")


def rows_of_the_page(text: str) -> list[list[str]]:
    """The cells of the generated table."""
    lines = text[text.index(exactness.BEGIN) : text.index(exactness.END)].splitlines()
    rows = [line.removeprefix("|").removesuffix("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def broken_rows(text: str) -> list[str]:
    """List the rows of the page whose counts contradict their promises, and models that are missing."""
    rows, wrong = rows_of_the_page(text), []
    for row in rows:
        for promise, count in (row[4:6], row[6:8]):
            compared, _, differing = count.partition(", ")
            kept = count == exactness.NOT_MEASURED or (compared not in ("", "0") and differing == "0")
            if promise in _STRICT and not kept:
                wrong.append(f"{' '.join(row[:3])}: {promise}, but {count}")
    named = [tuple(row[:3]) for row in rows]
    return wrong + [f"{case.key} is missing" for case in exactness.CASES if case.key not in named]


def test_the_table_is_the_tools_and_its_promises_were_kept() -> None:
    text = PAGE.read_text("utf-8")
    assert broken_rows(text) == []
    assert all(row[4] in (*PROMISES, exactness.NOT_MEASURED) for row in rows_of_the_page(text))
    stock = [row for row in rows_of_the_page(text) if "stock=True" in row[2]]
    # What sentences with stock=True refer to.
    assert {row[6] for row in stock} - {exactness.NOT_MEASURED} == {"same bits"}


def test_a_broken_row_is_seen() -> None:
    def page(*counts: int, first: int = 0) -> str:
        found = exactness.Found("same tokens", exactness.Count(*counts), ("same bits", exactness.Count(9)))
        rows = [exactness.row_of(case, found) for case in exactness.CASES[first:]]
        return exactness.replaced(f"{exactness.BEGIN}\n{exactness.END}", exactness.table(rows, 8, 48))

    assert not broken_rows(page(1512, 0))
    assert len(broken_rows(page(1512, 2))) == len(broken_rows(page(0, 0))) == len(exactness.CASES)
    assert broken_rows(page(9, 0, first=1)) == [f"{exactness.CASES[0].key} is missing"]
