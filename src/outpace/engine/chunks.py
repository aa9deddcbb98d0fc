"""Prompts fed in chunks: which of their rows a step feeds, and how many."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

import numpy as np

from outpace.cache import Cache
from outpace.engine.active import Active

_LEAST = 16  # minimum number of rows of a chunk
_REMEMBERED = 16  # forwards from whose seconds the size of a chunk is computed


def choose_chunks(
    batch: Collection[Active], cache: Cache, pace: Pace, mixes: bool, prompts_differ: bool, step: int = 1
) -> dict[Active, int]:
    """Choose the rows of prompts to feed: those in a forward before that of the step, and ``Active.chunk``.

    A prompt of n tokens has n - 1 rows to feed; its last token is the first root. Rows in the step's forward
    save a second reading of the weights. If they are a prompt's last ones, its root follows them there::

        before     prompt A: 64 rows
        the step   B decodes: root, draft | prompt C: 16 rows | prompt D: its last 5 rows, root, draft

    While other sequences are decoding, prompts share a chunk that ``pace`` allows; otherwise each feeds a
    full one. It is in the step's forward if the target mixes rows, otherwise it has its own. If none is
    decoding, the last rows of all prompts are fed with their roots, which saves a forward: those of every
    prompt if the target mixes rows, otherwise the same number of each. Where rows of prompts differ from
    those of steps, or end at multiples of a number, all have a forward before the step's.

    Args:
        mixes: whether the target mixes rows of prompts with those of steps in this batch.
        prompts_differ: whether rows of prompts differ from those of steps.
        step: chunks end at multiples of this, or with their prompt.

    Returns:
        Number of rows to feed before the step by sequence; maybe 0.
    """
    for active in batch:
        active.chunk = None
    reading = sorted((a for a in batch if not a.ready), key=lambda a: a.rank, reverse=True)
    if not reading:
        return {}
    left = {a: len(a.sequence.tokens) - 1 - cache.length(a.slot) for a in reading}
    if decoding := len(batch) - len(reading):
        chunk = _split(left, pace.rows(decoding, len(reading) if mixes else 0))
    else:
        chunk = {a: min(rows, pace.most) for a, rows in left.items()}
    if step > 1:
        return {a: _up_to(a, cache, rows, step) for a, rows in chunk.items()}
    if decoding:
        return _with_step(chunk) if mixes else chunk
    if prompts_differ:
        return chunk
    if mixes and any(chunk[a] == rows for a, rows in left.items()):
        return _with_step(chunk)
    last = min(chunk.values())
    if any(rows - last > pace.most for rows in left.values()):
        return chunk
    before = {a: rows - last for a, rows in left.items()}
    if last:
        _with_step(dict.fromkeys(left, last))
    return before


def _with_step(chunk: Mapping[Active, int]) -> dict[Active, int]:
    """Feed a chunk in the step's forward, and nothing before it."""
    for active, rows in chunk.items():
        active.chunk = rows
    return {}


def _up_to(active: Active, cache: Cache, rows: int, step: int) -> int:
    """The size of a chunk of about this number of rows that ends at a multiple, or with its prompt.

    The prompt's last multiple ends a chunk too, so that the state there can be shared.
    """
    start, end = cache.length(active.slot), active.sequence.prompt_length - 1
    if start >= end or not rows:  # emitted tokens, which are fed again
        return rows
    last = end // step * step
    border = min((start + rows) // step * step, last)
    if border <= start:
        border = start // step * step + step
    return min(border, end) - start


def _split(left: Mapping[Active, int], rows: int) -> dict[Active, int]:
    """Split a chunk among prompts: half goes to the first, the rest to those with the fewest rows left."""
    first, *others = left
    shares = {first: min(left[first], rows // 2 if others else rows)}
    for active in [*sorted(others, key=left.__getitem__), first]:
        spare = rows - sum(shares.values())
        shares[active] = min(left[active], shares.get(active, 0) + spare)
    return {active: share for active, share in shares.items() if share}


class Pace:
    """Number of a prompt's rows that cost about half a decode step, from measurements.

    The seconds of a forward are taken as a constant, plus a price per row that is decoded, plus one per row
    of a prompt.

    Args:
        most: maximum number of rows of a chunk, used as is when no sequence is decoding.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # The latest forwards without and with rows of prompts: decoding rows, rows of prompts, seconds.
        self._forwards = [deque[tuple[int, int, float]](maxlen=_REMEMBERED) for _ in range(2)]
        self._width = 1.0  # rows per decoding sequence in the latest step
        self._prices: list[float] | None = None  # the constant, of a decoding row, and of a row of a prompt

    def measured(self, decoding: int, drafted: int, prompts: int, seconds: float) -> None:
        """Take the measurement of a forward.

        Args:
            decoding: number of decoding sequences.
            drafted: their rows, roots and drafts.
            prompts: number of rows of prompts.
        """
        self._forwards[prompts > 0].append((drafted, prompts, seconds))
        if decoding:
            self._width = drafted / decoding
        if prompts or self._prices is None:
            self._fit()

    def _fit(self) -> None:
        if all(self._forwards):
            forwards = np.array([forward for some in self._forwards for forward in some])
            inputs = np.column_stack([np.ones(len(forwards)), forwards[:, :2]])
            self._prices = np.linalg.lstsq(inputs, forwards[:, 2], rcond=None)[0].tolist()

    @property
    def row_seconds(self) -> float | None:
        """Seconds of a further row of a prompt in a forward; None before it was measured."""
        return None if self._prices is None or self._prices[2] <= 0 else self._prices[2]

    def without(self, prompts: int, seconds: float) -> float | None:
        """Seconds of a forward without its rows of prompts; None if they took most of them, or too unsure."""
        price = self.row_seconds if prompts else 0.0
        return None if price is None or 2 * price * prompts > seconds else seconds - price * prompts

    def rows(self, decoding: int, joining: int = 0) -> int:
        """Rows of the next chunk.

        A chunk alone takes half the time of a step. With a chunk in it, a step takes one and a half times
        that of a step in which the joining sequences decode too: so it is the larger, the more of them wait.

        Args:
            decoding: number of sequences that are decoding.
            joining: number of sequences whose prompts ride in the step; 0 if they have their own forward.
        """
        least = min(_LEAST, self.most)
        self._fit()
        if self._prices is None:
            return least
        constant, drafted, prompt = self._prices
        sequence = drafted * self._width
        spare = (constant + sequence * decoding) / 2 + 1.5 * sequence * joining
        affordable = self.most if prompt <= 0 else int(spare / prompt)
        tried = max(rows for _, rows, _ in self._forwards[True])
        return max(least, min(affordable, 2 * tried, self.most))  # no more than twice what was measured
