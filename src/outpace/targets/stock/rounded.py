"""A target with rounded weights, which drafts for the target that it was made of, in that one's caches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from outpace.cache import Cache, KVCache
from outpace.core import UnsupportedModel
from outpace.targets.around import AroundTarget
from outpace.targets.batch import Batch
from outpace.targets.cpu.trials import clock, products_of_a_row
from outpace.targets.hardware import free_bytes
from outpace.targets.inputs.changes import WatchedWeights
from outpace.targets.inputs.config import family
from outpace.targets.inputs.refusals import why_untouchable
from outpace.targets.rows import Output

if TYPE_CHECKING:
    from outpace.targets.stock.causal import CausalTarget

_log = logging.getLogger(__name__)
_VERIFIED, _TEXT = 5, 8  # rows of a verified draft, and of the text before it, in a trial
_TURNS, _LONG = 5, 0.3  # runs in a trial, and the seconds after which there are no more of them
_SOON = 8e-3  # seconds of a step below which an answer's savings are less than a trial and rounding take
_CHOICE = 3e-4  # seconds in which a drafter chooses a token, besides the forward
_SHARE = 0.5  # share of the free memory that rounded weights may take


class RoundedTarget(AroundTarget):
    """The rounded self of a target. Its rows in a cache of the target are for drafts, and not to be kept.

    Weights are rounded by ``make``, at the latest for the first draft.

    Args:
        target: the target.
        bits: of the weights of its linear layers, 8 or 4.

    Attributes:
        stale: weights or modules have changed since they were rounded.

    Raises:
        UnsupportedModel: the reason why it has none, or why it would gain nothing.
    """

    inner: CausalTarget

    def __init__(self, target: CausalTarget, bits: int) -> None:
        self.wrap(target)
        self.bits = bits
        if why := why_not_rounded(target, bits):
            raise UnsupportedModel(f"{family(target.model)} has no rounded self: {why}")
        self.stale = True

    def make(self) -> None:
        """Round the weights as they are now, if they are not, or were others."""
        self.inner.follow(begins=False)
        known = None if self.stale else self._made_of
        if known is not self.inner._modules or self._live.changed(thorough=False):
            self._make()

    def _make(self) -> None:
        vars(self).pop("_part", None)  # its memory is needed
        self._made_of = self.inner._modules
        rounding = self._made_of.rounding(self.bits)
        self._live, self.stale = WatchedWeights(rounding.live), False
        began = time.perf_counter()
        self._part = self.inner.on_modules(self._made_of.rounded(rounding))
        seconds = time.perf_counter() - began
        _log.info("%s: weights rounded to %d bits for drafts, in %.1f s", self.name, self.bits, seconds)

    def look(self) -> None:
        """Look for changes of weights that steps read from the model, since a text begins."""
        self.stale = self.stale or self._live.changed(thorough=True)

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> KVCache:
        return self.inner.new_cache(slots, length, capacity)

    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        self.make()
        return self._part.forward(cache, batch, hidden_layers)


def why_not_rounded(target: CausalTarget, bits: int) -> str | None:
    """The reason why a target has no rounded self; None if it has one."""
    if target.device.type != "cpu":
        return f"it is on {target.device}, and rounded self-drafts are for a CPU"
    if target.options.static:
        return "its shapes are fixed; leave static out"
    # Of a model whose weights were freed, layers were replaced already.
    if why := target.not_rounded or (None if target.released else why_untouchable(target.model)):
        return why
    rounding, free = target._modules.rounding(bits), free_bytes(torch.device("cpu"))
    if not rounding.refused and free is not None and rounding.bytes > free * _SHARE:
        return (
            f"rounded weights take {rounding.bytes >> 20} MiB, more than half of the {free >> 20} MiB of "
            "memory that are free"
        )
    return rounding.refused


def costs_of(target: CausalTarget, bits: int = 4) -> tuple[float, float]:
    """``rounded_costs`` of a target: its own forwards are timed, and products with rounded weights.

    Raises:
        UnsupportedModel: it has none, or no use for it; the message has the reason.
    """
    if why := why_not_rounded(target, bits):
        raise UnsupportedModel(why)
    if (step := _seconds(target, 1)) < _SOON:
        raise UnsupportedModel(
            f"a step takes {step * 1e3:.1f} ms, so no answer would pay for rounding weights"
        )
    wide, rounding = _seconds(target, _VERIFIED), target._modules.rounding(bits)
    call, rounded = products_of_a_row(target.dtype, torch.get_num_threads())
    products = _best(rounding.multiply) - call * len(rounding.layers)
    least = sum(count * rounded[kind] for kind, count in rounding.numbers.items())
    row = max(step - max(products - least, 0.0), least)
    return wide / step, (row + _CHOICE) / step


def _seconds(target: CausalTarget, rows: int) -> float:
    """Seconds of a forward over some rows after a short text."""
    cache = target.new_cache(length=_TEXT + rows)
    slot = cache.allocate()
    target.forward(cache, Batch.of({slot: [0] * _TEXT}, None))
    cache.keep({slot: range(_TEXT)})

    def run() -> None:
        target.forward(cache, Batch.of({slot: [0] * rows}))
        cache.keep({})

    return _best(run)


def _best(run: Callable[[], None]) -> float:
    """Seconds of the quickest of several runs after the first, which fetches weights."""
    run()
    best, began = math.inf, clock()
    for _ in range(_TURNS):
        before = clock()
        run()
        best = min(best, clock() - before)
        if clock() - began > _LONG:
            break
    return best
