"""Forwards of fixed shapes, which a GPU replays as graphs, and programs of several forwards."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from outpace.cache import Cache, FixedCache
from outpace.core import TargetOptions
from outpace.targets.base import checked_cache
from outpace.targets.gpu.fixed import FixedShapes, Program, warm, width_of
from outpace.targets.gpu.graphs import NotCaptured
from outpace.targets.inputs.changes import Addresses
from outpace.targets.inputs.refusals import refuse_training
from outpace.targets.plan import StepPlan
from outpace.targets.stock.layouts import step_fixed
from outpace.targets.stock.uncached import UncachedForwards

_log = logging.getLogger(__name__)


class FixedSteps(UncachedForwards):
    """A target whose steps may have fixed shapes."""

    options: TargetOptions
    plan: StepPlan
    _fixed: FixedShapes | None = None
    _addresses: Addresses | None = None  # of all weights, which are in what ``_fixed`` has captured

    @abstractmethod
    def follow(self, begins: bool) -> None:
        """Follow changes of the model; ``begins``: a text begins."""

    def shapes_beside(self) -> FixedShapes | None:
        return None if self._fixed is None else self._fixed.lend()

    def plays(self, count: int, width: int = 1) -> bool:
        return self._fixed is not None and width_of(count, width) > 0

    @torch.inference_mode()
    def play(self, cache: Cache, program: Program) -> bool:
        refuse_training(self.model)
        fixed = checked_cache(self, cache, FixedCache)
        self.follow(begins=not all(map(fixed.length, program.widths)))
        shapes = self._fixed
        if shapes is None:
            return False
        try:
            for window in fixed.begin_fixed(program.widths, 1):
                shapes.play(program, window, self.device, partial(step_fixed, self))
        except NotCaptured as error:
            if self.options.static is True:
                raise
            fixed.keep({})
            self._launch(str(error))
            return False
        fixed.keep({slot: range(count) for slot, count in program.kept.items()})
        return True

    def warm(self, cache: Cache, slots: int, layers: Sequence[int]) -> None:
        if self._fixed is not None and isinstance(cache, FixedCache):
            warm(self, cache, slots, layers, trees=self._modules.trees is not None)

    def _launch(self, reason: str) -> None:
        """Run forwards one kernel at a time from now on."""
        self._fixed = self._addresses = None
        self.options, self.plan = replace(self.options, static=False), replace(self.plan, no_graphs=reason)
        _log.warning("forwards on this GPU are launched one kernel at a time: %s", reason)
