"""The choice between weights repacked for the processor and weights as they are in the file.

Repacked weights have other kernels: often faster ones, which may change bits at fewer rows, so that a step
takes more decodes. The choice changes the bits of a text. So that repeated self-tests agree, it is that of
the wider decodes, or repacked ones if these are equal, unless the other one is clearly faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from outpace.cache import Slot
from outpace.targets.batch import Batch
from outpace.targets.llamacpp.cache import LlamaCache
from outpace.targets.llamacpp.self_test import Widths, token_ids
from outpace.targets.rows import Rows

if TYPE_CHECKING:
    from outpace.targets.llamacpp.target import LlamaCppTarget

# Rows of a step, and what its seconds weigh: a plain step as much as steps of drafts, narrow to wide.
SHARES = {1: 0.5, 2: 0.125, 4: 0.125, 8: 0.125, 16: 0.125}
MARGIN = (
    1.3  # steps of the usual choice take more than this multiple of the other's seconds: the other is taken
)
_CHAIN = 8  # more rows than this are a tree
_BRANCH = 3  # nodes of each of its branches
_TIMED, _LEAST = 24, 3  # rows of the timed steps of a width, and least number of them


def repacks(packed: Widths | None, mapped: Widths | None, seconds: Sequence[Mapping[int, float]]) -> bool:
    """True if repacked weights are better than those as they are in the file.

    Args:
        packed, mapped: widths of each at which rows keep their bits; None if there are none.
        seconds: number of rows -> seconds of a step, of each; needed only if both have widths. Compared by
            the mean of the logarithms of their ratios, weighted by ``SHARES``.
    """
    if packed is None or mapped is None:
        return mapped is None
    repacked, others = seconds
    slower = math.exp(sum(share * math.log(others[rows] / repacked[rows]) for rows, share in SHARES.items()))
    return slower > MARGIN if mapped.wider(packed) else slower >= 1 / MARGIN


def costs(
    target: LlamaCppTarget, caches: Sequence[LlamaCache], widths: Sequence[Widths]
) -> list[dict[int, float]]:
    """Seconds of steps by their number of rows, medians of several in turns, for each cache and its widths.

    Args:
        target: its widths are changed.
    """
    tokens = token_ids(target.vocabulary, max(SHARES), 0)
    slots = [cache.allocate() for cache in caches]
    sides = list(zip(caches, slots, widths, strict=True))
    for cache, slot, width in sides:
        target.widths = width
        target.forward(cache, Batch.of({slot: tokens[:1]}, None))
        cache.keep({slot: [0]})
    found: list[dict[int, float]] = [{} for _ in sides]
    for rows in SHARES:
        step = Rows(tokens[:rows], _tree(rows))
        times = [_seconds(target, sides, step) for _ in range(max(_TIMED // rows, _LEAST))]
        for side, taken in zip(found, zip(*times, strict=True), strict=True):
            side[rows] = median(taken)
    return found


def _seconds(
    target: LlamaCppTarget, sides: Sequence[tuple[LlamaCache, Slot, Widths]], step: Rows
) -> list[float]:
    """Seconds of a step in each cache, at its widths; its rows are dropped."""
    found = []
    for cache, slot, width in sides:
        target.widths = width
        began = perf_counter()
        target.forward(cache, Batch.of({slot: step}))
        found.append(perf_counter() - began)
        cache.keep({slot: ()})
    return found


def _tree(rows: int) -> list[int] | None:
    """Parents of a root and branches below it; None, a chain, for few rows."""
    if rows <= _CHAIN:
        return None
    return [-1, *(0 if node % _BRANCH == 0 else node for node in range(rows - 1))]
