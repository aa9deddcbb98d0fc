"""Costs of forwards: seconds by number of sequences and rows, measured while decoding.

Step times are noisy, drift with the length of the text, and the first step of a shape is slow. A width is
therefore used from its second measurement on, and its cost is the median of its latest few; widths between
two measured ones are interpolated, a wider forward never counts as cheaper, and widths that were not measured
for long are dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_KEPT = 9  # latest measurements kept per width
_LIFE = 512  # measurements of a curve after which a width without a new one is dropped
_HOPE = 0.5  # share of the interpolated or extrapolated rise that an untried width is assumed to cost
_TILES = 64  # rows up to which kernels tile them: beyond, a row costs the slope
_SWEEP = 64  # measurements between two sweeps for widths to drop
_DRIFT = 0.25  # relative change of the least seconds per row that is not worth computing all curves again
_SLOPE = 0.1  # assumed cost of doubling the narrowest width's rows, as a share of its seconds


def bucket(number: int) -> int:
    """Round a number of rows or sequences down to an eighth of an octave, to keep tables small."""
    if number < 16:
        return number
    step = 1 << (number.bit_length() - 4)
    return number // step * step


@dataclass
class _Cell:
    """The latest measurements of one width.

    Attributes:
        rows: number of rows of the first measurement.
        known: seconds imported from another curve or a file.
        seconds: the lower median of the measurements; None before the second.
        last: index, among the curve's measurements, of the cell's latest one.
    """

    rows: float
    known: float | None = None
    seconds: float | None = None
    last: int = 0
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, seconds: float) -> bool:
        """Add a measurement; return True if the median changed."""
        before, samples = self.seconds, self.samples
        samples.append(seconds)
        if len(samples) > 1:
            self.seconds = sorted(samples)[(len(samples) - 1) // 2]
        return self.seconds != before


class Curve:
    """Seconds over rows for one number of sequences: measured, smoothed, interpolated.

    Args:
        slope: assumed cost of doubling the narrowest width's rows, as a share of its seconds, while no other
            width is known.

    Attributes:
        floor: least seconds per row of a forward wider than any known one.
    """

    def __init__(self, slope: float = _SLOPE, floor: float = 0.0) -> None:
        self.slope = slope
        self.floor = floor
        self._cells: dict[int, _Cell] = {}
        self._count = 0
        self._rows: list[float] = []
        self._seconds: list[float] = []
        self._answers: dict[float, float] = {}
        self._stale = True

    def __bool__(self) -> bool:
        return any(cell.seconds or cell.known for cell in self._cells.values())

    def age(self, rows: int) -> float:
        """Number of measurements of the curve since the latest one of a width; inf if it has none."""
        cell = self._cells.get(bucket(rows))
        return self._count - cell.last if cell is not None and len(cell.samples) > 1 else math.inf

    def points(self) -> list[tuple[float, float]]:
        """Rows and seconds of each width, narrow to wide.

        Of imported seconds only the ratios between widths are used: they are scaled by the median ratio at
        widths measured here too.
        """
        cells = list(self._cells.values())
        ratios = sorted(cell.seconds / cell.known for cell in cells if cell.seconds and cell.known)
        scale = ratios[len(ratios) // 2] if ratios else 1.0
        return sorted(
            (cell.rows, cell.seconds or scale * (cell.known or 0.0))
            for cell in cells
            if cell.seconds or cell.known
        )

    def add(self, rows: int, seconds: float) -> None:
        """Add a measurement; ignored if the clock stopped or jumped back."""
        if not 0 < seconds < math.inf:
            return
        place = bucket(rows)
        cell = self._cells.get(place)
        if cell is None:
            cell = self._cells[place] = _Cell(rows)
        self._count += 1
        cell.last = self._count
        if cell.add(seconds):
            self._stale = True
        if self._count % _SWEEP == 0:
            self._forget()

    def set_floor(self, floor: float) -> None:
        """Set the least seconds per row beyond the widest known width."""
        self.floor, self._stale = floor, True

    def take_over(self, points: Iterable[tuple[float, float]]) -> None:
        """Import seconds of widths, used until the widths are measured here."""
        for rows, seconds in points:
            self._cells.setdefault(bucket(round(rows)), _Cell(rows)).known = seconds
        self._stale = True

    def _forget(self) -> None:
        """Drop widths that were measured here, but not recently."""
        for place, cell in list(self._cells.items()):
            if cell.samples and cell.last < self._count - _LIFE:
                del self._cells[place]
                self._stale = True

    def seconds_at(self, rows: float) -> float:
        """Seconds of a forward over a number of rows; nan if nothing is known."""
        if self._stale:
            self._smooth()
        if rows not in self._answers:
            self._answers[rows] = self._between(rows) if self._rows else math.nan
        return self._answers[rows]

    def _between(self, rows: float) -> float:
        known = self._rows
        if rows < known[0] or rows > known[-1]:
            return self._beyond(rows)
        place = bisect_left(known, rows)
        if known[place] == rows:
            return self._seconds[place]
        share = (rows - known[place - 1]) / (known[place] - known[place - 1])
        if bucket(round(rows)) not in self._cells:
            share *= _HOPE  # jumps of the curve (kernels tile rows) are found only by trying
        low = self._seconds[place - 1]
        return low + share * (self._seconds[place] - low)

    def _beyond(self, rows: float) -> float:
        """Extrapolate beyond the widest or narrowest known width, by the mean slope of the curve.

        Widths within a factor of 2 do not determine the slope; the default one is used instead. Beyond the
        widest only a share of the slope is assumed: on processors a second row often costs a jump and the
        next ones little, which is found only by trying. Further rows than kernels tile cost the measured
        slope.
        """
        first, last = self._rows[0], self._rows[-1]
        slope, hoped = self.slope * self._seconds[0] / max(1.0, first), rows - last
        if last > first and last >= 2 * first:
            slope = (self._seconds[-1] - self._seconds[0]) / (last - first)
            hoped = max(0.0, min(rows, _TILES) - last)
        if rows > last:
            further = rows - last - (1 - _HOPE) * hoped
            return max(self._seconds[-1] + slope * further, self.floor * rows)
        return max(self._seconds[0] / 2, self._seconds[0] - slope * (first - rows))

    def _smooth(self) -> None:
        """Fit the closest non-decreasing curve (pool adjacent violators), weighted by measurements."""
        pools: list[tuple[float, int, list[float]]] = []  # mean seconds, weight, rows
        for width, seconds in self.points():
            weight, rows = max(1, len(self._cells[bucket(round(width))].samples)), [width]
            while pools and pools[-1][0] > seconds:
                above, heavy, wider = pools.pop()
                seconds = (above * heavy + seconds * weight) / (heavy + weight)
                weight, rows = heavy + weight, wider + rows
            pools.append((seconds, weight, rows))
        self._rows = [place for _, _, rows in pools for place in rows]
        self._seconds = [seconds for seconds, _, rows in pools for _ in rows]
        self._answers = {}
        self._stale = False


class Costs:
    """Seconds of forwards by sequences and rows: one curve per number of sequences.

    An engine's scheduler and its drafters' governors share one instance. ``slope`` as for ``Curve``.
    """

    def __init__(self, slope: float = _SLOPE) -> None:
        self._slope = slope
        self._floor = 0.0
        self._curves: dict[int, Curve] = {}

    def set_floor(self, floor: float) -> None:
        """Set the least seconds per row of a forward that is wider than any measured one.

        Rows of prompts give it before the first wide draft, which in a large batch costs many plain steps.
        """
        if abs(floor - self._floor) > _DRIFT * self._floor:
            self._floor = floor
            for curve in self._curves.values():
                curve.set_floor(floor)

    def seconds(self, batch: int, rows: int) -> float:
        """Seconds of a forward of ``batch`` sequences over ``rows`` rows in total; nan if unknown."""
        return self.curve(batch).seconds_at(rows)

    def add(self, batch: int, rows: int, seconds: float) -> None:
        self.curve(batch).add(rows, seconds)

    def curve(self, batch: int) -> Curve:
        """The curve of a batch size; a new one uses the nearest batch size's points until it is measured."""
        place = bucket(batch)
        if place not in self._curves:
            known = [other for other, curve in self._curves.items() if curve]
            made = self._curves[place] = Curve(self._slope, self._floor)
            if known:
                nearest = min(known, key=lambda other: abs(math.log(other / place)))
                made.take_over(self._curves[nearest].points())
        return self._curves[place]

    def dump(self) -> dict[str, list[list[float]]]:
        """Batch size -> rows and seconds of each width, for a file."""
        return {
            str(batch): [list(point) for point in curve.points()]
            for batch, curve in sorted(self._curves.items())
            if curve
        }

    def fill(self, table: Mapping[str, Iterable[tuple[float, float]]]) -> None:
        """Import a table that ``dump`` returned, used until the same widths are measured here.

        Raises:
            ValueError, TypeError, AttributeError: it is not such a table.
        """
        for batch, points in table.items():
            if int(batch) < 1:
                raise ValueError(f"a batch of {batch}")
            taken = [(float(rows), float(seconds)) for rows, seconds in points]
            for rows, seconds in taken:
                if not 0 < seconds < math.inf or not 0 <= rows < math.inf:
                    raise ValueError(f"{seconds} seconds for {rows} rows")
            self._curves.setdefault(bucket(int(batch)), Curve(self._slope, self._floor)).take_over(taken)
