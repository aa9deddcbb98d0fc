"""Record of a whole benchmark, and its JSON format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outpace.bench.rows import Row
from outpace.core import OutpaceError, first_line
from outpace.files import read_json

FORMAT, VERSION = "outpace bench", 1
# What distinguishes rows of the same drafter in a file of several runs.
_MOST_BYTES = 1 << 26
_DISTINGUISHING = ("verifier", "adaptive", "temperature", "top_p", "prompts")


@dataclass
class BenchRecord:
    """Results of a benchmark, with the machine, the model and the settings.

    Attributes:
        model: name, dtype, device, the target's ``promise``, and whether it is bit-exact or why it is not
            (``bits``).
        settings: the options that the figures depend on.
        notes: further remarks: omitted prompts and peers, with the reason.
        whole: all requested methods and prompts were measured.
        interrupted: it is incomplete because the user stopped it; otherwise the notes give the reason.
        peers: versions in the environments of other libraries' methods, by library.
    """

    machine: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    command: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole: bool = True
    interrupted: bool = False
    peers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.error is not None]

    @property
    def broken(self) -> list[Row]:
        """Rows of outpace's methods whose outputs differ from plain decoding's despite the promise."""
        return [row for row in self.rows if not row.peer and row.breaks_promise(self.model["promise"])]

    @property
    def equal(self) -> bool:
        """True if everything was measured, and no promise is broken."""
        return self.whole and not self.failed and not self.broken


def as_json(record: BenchRecord) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        **vars(record),
        "rows": [row_json(row, record.settings) for row in record.rows],
    }


def row_json(row: Row, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row; the figures of a failed one are null."""
    found = asdict(row)
    speed = found.pop("speed") or {}
    return {
        "suite": row.suite,
        "drafter": row.drafter,
        "batch": row.batch,
        "temperature": settings.get("temperature"),
        "top_p": settings.get("top_p"),
        "tokens_per_second": speed.get("tokens_per_second"),
        "speedup": speed.get("speedup"),
        "speedup_interval": speed.get("interval"),
        "speedup_total": speed.get("speedup_total"),
        "groups": speed.get("groups"),
        "tokens_per_second_quartiles": speed.get("quartiles"),
        "decode_tokens_per_second": speed.get("decode_tokens_per_second"),
        "decode_speedup": speed.get("decode_speedup"),
        "prefill_seconds": speed.get("prefill_seconds"),
        **{name: value for name, value in found.items() if name not in ("suite", "drafter", "batch")},
    }


def read_rows(file: Path) -> tuple[dict[str, Any], dict[tuple[str, str, int], dict[str, Any]]]:
    """Read a benchmark's JSON, and its rows by suite, drafter and batch.

    Where a file of several runs has a drafter more than once, what differs follows its name in parentheses:
    ``suffix (governed)``.

    Raises:
        OutpaceError: there is no such file, or it is not a benchmark's JSON.
    """
    try:
        found = read_json(file, _MOST_BYTES)
    except OutpaceError as error:
        raise OutpaceError(
            f"{file} is not a benchmark's JSON ({error}); outpace bench --json {file} writes one"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise OutpaceError(
            f"{file} is not a benchmark's JSON of this version; outpace bench --json {file} writes one"
        )
    try:
        _check(found)
        names = _names(found["rows"])
    except (KeyError, TypeError, AttributeError) as error:
        raise OutpaceError(
            f"{file} is broken ({first_line(error)}); outpace bench --json {file} writes it anew"
        ) from None
    rows: Seq[dict[str, Any]] = found["rows"]
    return found, {(row["suite"], name, row["batch"]): row for name, row in zip(names, rows, strict=True)}


def _names(rows: Seq[dict[str, Any]]) -> list[str]:
    """Names of the rows that are unique within their suites and batches."""
    names = [row["drafter"] for row in rows]
    for drafter in set(names):
        places = [place for place, row in enumerate(rows) if row["drafter"] == drafter]
        keys: list[tuple[Any, ...]] = [(rows[place]["suite"], rows[place]["batch"]) for place in places]
        words: list[list[str]] = [[] for _ in places]
        for name in _DISTINGUISHING:
            longer = [(*key, rows[place].get(name)) for key, place in zip(keys, places, strict=True)]
            if len(set(longer)) > len(set(keys)):
                keys = longer
                for own, place in zip(words, places, strict=True):
                    own.extend(_word(name, rows[place].get(name)))
        if len(set(keys)) < len(keys):  # nothing recorded distinguishes them
            seen: Counter[tuple[Any, ...]] = Counter()
            for own, key in zip(words, keys, strict=True):
                seen[key] += 1
                own.append(f"run {seen[key]}")
        for own, place in zip(words, places, strict=True):
            if own:
                names[place] += f" ({', '.join(own)})"
    return names


def _word(name: str, value: Any) -> list[str]:
    """One field as words of a label; none for a field that does not apply."""
    if value is None:
        return []
    if name == "adaptive":
        return ["governed" if value else "ungoverned"]
    if name == "verifier":
        return [str(value)]
    return [f"{value} prompts" if name == "prompts" else f"{name} {value}"]


def _check(found: Mapping[str, Any]) -> None:
    """Access every field that a comparison reads, to detect broken files."""
    for part in ("model", "settings", "machine"):
        found[part].get("name")
    for named in (found.get("peers") or {}, found["settings"].get("suites") or {}):
        named.keys()
    for row in found["rows"]:
        for name in ("suite", "drafter", "batch", "speedup", "speedup_interval", "error"):
            row[name]
