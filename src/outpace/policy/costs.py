"""What steps cost: seconds over the rows of a forward, measured while decoding, kept and forgotten.

Step times jitter, drift with the length of the text, and the first one of a shape is slow. So a width's first
step counts until the next, a width keeps its latest few measurements and answers with their median, widths
between two measured ones are interpolated, wider never counts as cheaper, and what was not seen for long is
forgotten.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError

FORMAT, VERSION = "outpace-costs", 1
_KEPT = 9  # measurements of one width
_SAMPLE = 4  # steps from one measurement to the next of a width that has them all: it would tell little
_HOPE = 0.5  # of what a line between two widths says, a width between them is taken to cost until it is tried
_TRUSTED = 3  # measurements from which on a median is believed, however high
_SURPRISE = 1.5  # times what was expected, that an earlier one may be at most
# Steps after which a width not seen any more is forgotten: trusted, not trusted, seen once.
_LIFE, _DOUBTFUL_LIFE, _FIRST_LIFE = 512, 96, 8
_SLOPE = 0.1  # of the narrowest width's seconds, that as many rows more are taken to cost at first
_SPAN = 8  # times as wide as the narrowest, that a width must be to tell how steep the curve is


def bucket(number: int) -> int:
    """A number of rows or sequences to at most eighth of an octave, so that tables stay small."""
    if number < 16:
        return number
    step = 1 << (number.bit_length() - 4)
    return number // step * step


class Cell:
    """The latest measurements of one width.

    Attributes:
        rows: mean rows of the measurements.
        seconds: their median, the lower of two.
        last: the step of the latest.
        borrowed: nothing was measured here yet; the first measurement replaces what stands.
    """

    __slots__ = ("_samples", "borrowed", "last", "rows", "seconds")

    def __init__(self, rows: float, seconds: float, last: int, borrowed: bool) -> None:
        self.rows = rows
        self.seconds = seconds
        self.last = last
        self.borrowed = borrowed
        self._samples: deque[float] = deque([] if borrowed else [seconds], _KEPT)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, rows: int, seconds: float, last: int) -> None:
        self._samples.append(seconds)
        count = len(self._samples)
        self.rows += (rows - self.rows) / count
        self.seconds = sorted(self._samples)[(count - 1) // 2]
        self.last = last
        self.borrowed = False


class Curve:
    """Seconds over rows: measured, smoothed, interpolated.

    Args:
        slope: how much of the narrowest width's seconds each further such width is taken to cost, where no
            other width is known; of widths that were known and are forgotten, that is remembered.
    """

    def __init__(self, slope: float = _SLOPE) -> None:
        self.slope = slope
        self._cells: dict[int, Cell] = {}
        self._warm: set[int] = set()
        self._rows: list[float] = []
        self._seconds: list[float] = []
        self._answers: dict[float, float] = {}
        self._stale = True

    def __bool__(self) -> bool:
        return bool(self._cells)

    def cell(self, rows: int) -> Cell | None:
        return self._cells.get(bucket(rows))

    def points(self) -> list[tuple[float, float]]:
        """Rows and seconds of each width, narrow to wide, as measured."""
        return sorted((cell.rows, cell.seconds) for cell in self._cells.values())

    def add(self, rows: int, seconds: float, step: int, borrowed: bool = False) -> None:
        """Take in a measurement; a borrowed one only where there is none.

        The first of a width, which includes whatever is done once (kernels chosen, memory found), stands
        until the next. Until there are a few, none counts as much slower than what the other widths say.
        Once there are many, those that come close upon each other are left out.
        """
        place = bucket(rows)
        cell = self._cells.get(place)
        if cell is not None and len(cell) == _KEPT and 0 <= step - cell.last < _SAMPLE:
            return
        if not borrowed and self._cells and (cell is None or len(cell) < _TRUSTED):
            seconds = min(seconds, _SURPRISE * self.at(rows))
        if cell is None and place not in self._warm:
            self._warm.add(place)
            borrowed = True
        if cell is None:
            self._cells[place] = Cell(rows, seconds, step, borrowed)
        elif not borrowed:
            cell.add(rows, seconds, step)
        self._stale = True

    def forget(self, step: int, keep: int) -> None:
        """Drop the widths not seen for long, but for that of ``keep`` rows; the less known the sooner.

        What came from elsewhere, at step 0, stays until it is measured.
        """
        spared = bucket(keep)
        for place, cell in list(self._cells.items()):
            life = _LIFE if len(cell) >= _TRUSTED else _DOUBTFUL_LIFE if len(cell) else _FIRST_LIFE
            if place != spared and 0 < cell.last < step - life:
                del self._cells[place]
                self._stale = True

    def at(self, rows: float) -> float:
        """Seconds of a forward over so many rows; nan where nothing was measured.

        Steps of the curve (tiles of rows) are found by trying only, so a width not tried yet gets credit.
        """
        if self._stale:
            self._smooth()
        if rows not in self._answers:
            self._answers[rows] = self._between(rows) if self._rows else math.nan
        return self._answers[rows]

    def _between(self, rows: float) -> float:
        known = self._rows
        place = bisect_left(known, rows)
        if rows < known[0] or rows > known[-1]:
            return self._beyond(rows)
        if known[place] == rows:
            return self._seconds[place]
        share = (rows - known[place - 1]) / (known[place] - known[place - 1])
        if bucket(round(rows)) not in self._cells:
            share *= _HOPE
        low = self._seconds[place - 1]
        return low + share * (self._seconds[place] - low)

    def _beyond(self, rows: float) -> float:
        """Past the widest width measured, or short of the narrowest: on, by the mean slope of them all.

        Of widths alike that says nothing; there the usual slope is taken.
        """
        first, last = self._rows[0], self._rows[-1]
        slope = self.slope * self._seconds[0] / first
        if last >= 2 * first:
            slope = (self._seconds[-1] - self._seconds[0]) / (last - first)
        if rows > last:
            return self._seconds[-1] + slope * (rows - last)
        return max(self._seconds[0] / 2, self._seconds[0] - slope * (first - rows))

    def _smooth(self) -> None:
        """The closest curve that never falls (pool adjacent violators), each width by its measurements."""
        pools: list[tuple[float, int, list[float]]] = []
        for cell in sorted(self._cells.values(), key=lambda cell: cell.rows):
            seconds, weight, rows = cell.seconds, max(1, len(cell)), [cell.rows]
            while pools and pools[-1][0] > seconds:
                above, heavy, wider = pools.pop()
                seconds = (above * heavy + seconds * weight) / (heavy + weight)
                weight, rows = heavy + weight, wider + rows
            pools.append((seconds, weight, rows))
        self._rows = [place for _, _, rows in pools for place in rows]
        self._seconds = [seconds for seconds, _, rows in pools for _ in rows]
        self._stale = False
        self._answers = {}
        if self._rows and self._seconds[0] > 0 and self._rows[-1] >= _SPAN * self._rows[0]:
            more = self._rows[-1] / self._rows[0] - 1
            self.slope = (self._seconds[-1] / self._seconds[0] - 1) / more


class Costs:
    """Curves by the number of sequences in a batch, since each sequence costs something of its own."""

    def __init__(self, slope: float = _SLOPE) -> None:
        self._slope = slope
        self._curves: dict[int, Curve] = {}

    def curve(self, batch: int) -> Curve:
        """The curve of a batch; a new one borrows the nearest batch's until it is measured itself."""
        place = bucket(batch)
        if place not in self._curves:
            self._curves[place] = self._borrowed(place)
        return self._curves[place]

    def _borrowed(self, place: int) -> Curve:
        known = [batch for batch, other in self._curves.items() if other]
        if not known:
            return Curve(self._slope)
        nearest = min(known, key=lambda batch: abs(math.log(batch / place)))
        curve = Curve(self._curves[nearest].slope)
        for rows, seconds in self._curves[nearest].points():
            curve.add(max(1, round(rows)), seconds, 0, borrowed=True)
        return curve

    def dump(self) -> dict[str, list[tuple[float, float]]]:
        """Batch -> rows and seconds, for JSON."""
        return {str(batch): curve.points() for batch, curve in sorted(self._curves.items()) if curve}

    def fill(self, table: Mapping[str, Iterable[tuple[float, float]]]) -> None:
        """Take in what ``dump`` gave, until the same is measured anew.

        Raises:
            ValueError, TypeError, AttributeError: it is no such table.
        """
        for batch, points in table.items():
            curve = self._curves.setdefault(bucket(_count(batch)), Curve(self._slope))
            for rows, seconds in points:
                if not 0 < seconds < math.inf or not 1 <= rows < math.inf:
                    raise ValueError(f"{seconds} seconds for {rows} rows")
                curve.add(round(rows), float(seconds), 0, borrowed=True)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"a batch of {number}")
    return number


def save_costs(path: str | Path, identity: str, entry: Mapping[str, Any]) -> None:
    """Write measured costs to a JSON file, beside those of other identities that are there already.

    Args:
        identity: what was measured: model, dtype, device.
        entry: its costs.

    Raises:
        OutpaceError: the path holds something else.
    """
    path = Path(path)
    known = _read(path) if path.exists() else {}
    kept = {**known, identity: {**known.get(identity, {}), **entry}}
    text = json.dumps({"format": FORMAT, "version": VERSION, "costs": kept}, indent=1)
    # Written beside and moved, so that a reader never meets half a file.
    draft = path.with_name(path.name + ".part")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)


def load_costs(path: str | Path, identity: str) -> dict[str, Any]:
    """The costs of one identity from a JSON file that ``save_costs`` wrote.

    Raises:
        OutpaceError: no such file, a broken or foreign one, or one that lacks this identity.
    """
    path = Path(path)
    if not path.exists():
        raise OutpaceError(f"there is no file of costs at {path}; engine.save_costs(path) writes one")
    known = _read(path)
    if identity not in known:
        raise OutpaceError(
            f"{path} holds no costs of {identity!r}, but of: {', '.join(map(repr, known)) or 'nothing'}; "
            "costs hold for the model, dtype and device they were measured on; measure here, without a file"
        )
    return known[identity]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutpaceError(f"{path} is no file of costs, or a broken one ({error}); delete it") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise OutpaceError(f"{path} is a JSON file of something else; give another path for the costs")
    costs = found.get("costs")
    if found.get("version") != VERSION:
        raise OutpaceError(f"{path} has version {found.get('version')!r} of costs, not {VERSION}; delete it")
    if not isinstance(costs, dict) or not all(isinstance(entry, dict) for entry in costs.values()):
        raise OutpaceError(f"{path} is a broken file of costs: it has no table of them; delete it")
    return costs
