"""A target with rounded weights, which drafts for the target that it was made of, in that one's caches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from outpace.cache import Cache, KVCache
from outpace.core import UnsupportedModel
from outpace.targets.around import AroundTarget
from outpace.targets.batch import Batch
from outpace.targets.cpu.trials import clock, products_of_a_row
from outpace.targets.hardware import free_bytes
from outpace.targets.inputs.changes import WatchedWeights
from outpace.targets.inputs.config import family
from outpace.targets.inputs.refusals import why_untouchable
from outpace.targets.native.few import FewOutputs
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
        head_share: the head's share of the weights that a row reads, if it can be cut (``few``); otherwise 0.

    Raises:
        UnsupportedModel: the reason why it has none, or why it would gain nothing.
    """

    inner: CausalTarget

    def __init__(self, target: CausalTarget, bits: int) -> None:
        self.wrap(target)
        self.bits = bits
        if why := why_not_rounded(target, bits):
            raise UnsupportedModel(f"{family(target.model)} has no rounded self: {why}")
        self.stale, self.head_share = True, target._modules.rounding(bits).head_share
        self._few = WeakSet[FewTokens]()

    def make(self) -> None:
        """Round the weights as they are now, if they are not, or were others."""
        self.inner.follow(begins=False)
        known = None if self.stale else self._made_of
        if known is not self.inner._modules or self._live.changed(thorough=False):
            self._make()

    def _make(self) -> None:
        vars(self).pop("part", None)  # its memory is needed
        for few in self._few:
            few.drop()
        self._made_of = self.inner._modules
        rounding = self._made_of.rounding(self.bits)
        self._live, self.stale = WatchedWeights(rounding.live), False
        began = time.perf_counter()
        self.part = self.inner.on_modules(self._made_of.rounded(rounding))
        seconds = time.perf_counter() - began
        _log.info("%s: weights rounded to %d bits for drafts, in %.1f s", self.name, self.bits, seconds)

    def few(self, first: int) -> FewTokens:
        """This with logits of the first tokens, and of those that are added to them, for one engine."""
        found = FewTokens(self, first)
        self._few.add(found)
        return found

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
        return self.now().forward(cache, batch, hidden_layers)

    def now(self) -> CausalTarget:
        """The target with the weights as they are now, rounded; for several forwards between changes."""
        self.make()
        return self.part


class FewTokens:
    """A rounded self that predicts the first tokens of a vocabulary, and those that texts have besides.

    Args:
        whole: the rounded self, whose head can be cut.
        first: number of the first tokens.
    """

    _made: tuple[CausalTarget, FewOutputs] | None = None

    def __init__(self, whole: RoundedTarget, first: int) -> None:
        self._whole, self._first = whole, first

    @property
    def ids(self) -> Tensor:
        """The tokens whose logits ``now`` returns."""
        assert self._made is not None
        return self._made[1].ids

    def add(self, tokens: Sequence[int]) -> int:
        """Predict these tokens of a text too; return how many of them were not predicted."""
        # In every step of every text, so it does not look for changes of weights: ``now`` does.
        _, head = self._made or self._current()
        missed = sum(not head.has(token) for token in tokens)
        if missed and head.add(tokens):
            self._made = _with_head(self._whole.part, head), head
        return missed

    def now(self) -> CausalTarget:
        """``RoundedTarget.now``, with logits of ``ids``, until tokens are added."""
        return self._current()[0]

    def drop(self) -> None:
        """Free its weights, and its share of the rounded self's."""
        self._made = None

    def _current(self) -> tuple[CausalTarget, FewOutputs]:
        part = self._whole.now()
        if self._made is None:
            assert part._modules.native is not None
            head = FewOutputs(part._modules.native.products[-1], self._first)
            self._made = _with_head(part, head), head
        return self._made


def _with_head(part: CausalTarget, head: FewOutputs) -> CausalTarget:
    native = part._modules.native
    assert native is not None
    return part.on_modules(part._modules.with_native(native.with_head(head.product(), head)))


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
