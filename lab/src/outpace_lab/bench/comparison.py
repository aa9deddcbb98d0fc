"""Comparison of two benchmarks, and which figures agree, as pure functions of their JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outpace.bench.runs import BASELINE
from outpace.bench.statistics import overlap

Key = tuple[str, str, int]
# Besides the model, these must be equal for two runs to be comparable.
_SETTINGS = (
    *("max_new_tokens", "temperature", "top_p", "seed", "repeats", "verifier", "adaptive", "ends", "limit"),
    "assistant",
)
_ABSENT = {"top_p": 1.0}  # the values that applied before a setting existed


@dataclass(frozen=True)
class Pair:
    """A row of both benchmarks.

    Attributes:
        overlap: the intervals of the speedup over plain decoding overlap; None if one is missing.
    """

    suite: str
    drafter: str
    batch: int
    first: Mapping[str, Any]
    second: Mapping[str, Any]

    @property
    def overlap(self) -> bool | None:
        return overlap(self.first["speedup_interval"], self.second["speedup_interval"])

    @property
    def change(self) -> float | None:
        """The second's speed relative to plain decoding, over the first's."""
        one, two = self.first["speedup"], self.second["speedup"]
        return two / one if one and two else None


@dataclass(frozen=True)
class Comparison:
    """Two benchmarks side by side.

    Attributes:
        pairs: rows in both benchmarks.
        only_first, only_second: rows in only one of them.
        differing: settings, versions and hardware that differ.
    """

    pairs: list[Pair]
    only_first: list[Key]
    only_second: list[Key]
    differing: list[str]

    @property
    def comparable(self) -> list[Pair]:
        """Pairs that have intervals and are not plain decoding, whose ratio to itself is 1."""
        return [pair for pair in self.pairs if pair.overlap is not None and pair.first["drafter"] != BASELINE]

    @property
    def agreeing(self) -> int:
        return sum(bool(pair.overlap) for pair in self.comparable)


def compare(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    rows: tuple[Mapping[Key, Mapping[str, Any]], Mapping[Key, Mapping[str, Any]]],
) -> Comparison:
    """Compare two benchmarks' JSON objects; ``rows`` are their rows by suite, drafter and batch."""
    mine, theirs = rows
    pairs = [Pair(*key, mine[key], theirs[key]) for key in mine if key in theirs]
    differing = [
        f"{part} {name}: {one} and {other}"
        for part, names in (
            ("model", ("name", "dtype", "device")),
            ("settings", _SETTINGS),
            ("machine", ("processor", "device", "threads", "torch", "transformers", "outpace", "commit")),
        )
        for name in names
        for one, other in [[found[part].get(name, _ABSENT.get(name)) for found in (first, second)]]
        if one != other
    ]
    differing += _differing("source of", first["settings"].get("suites"), second["settings"].get("suites"))
    differing += _differing("environment of", first.get("peers"), second.get("peers"))
    return Comparison(
        pairs,
        [key for key in mine if key not in theirs],
        [key for key in theirs if key not in mine],
        differing,
    )


def _differing(what: str, first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> Iterator[str]:
    """List the names that both contain with different values."""
    mine, theirs = first or {}, second or {}
    for name in sorted(mine.keys() & theirs.keys()):
        if mine[name] != theirs[name]:
            yield f"{what} {name}: {mine[name]} and {theirs[name]}"


def as_json(found: Comparison) -> dict[str, Any]:
    """Convert to one JSON object, with a row per pair."""
    names = ("tokens_per_second", "speedup", "speedup_interval", "tau", "acceptance_rate", "equal", "error")
    return {
        "rows": [
            {
                "suite": pair.suite,
                "drafter": pair.drafter,
                "batch": pair.batch,
                "first": {name: pair.first.get(name) for name in names},
                "second": {name: pair.second.get(name) for name in names},
                "change": pair.change,
                "overlap": pair.overlap,
            }
            for pair in found.pairs
        ],
        "only_first": [list(key) for key in found.only_first],
        "only_second": [list(key) for key in found.only_second],
        "differing": found.differing,
        "agreeing": found.agreeing,
        "comparable": len(found.comparable),
    }
