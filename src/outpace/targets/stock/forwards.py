"""Forwards of transformers' modules over windows of a cache: padded, or of fixed shapes.

A padded window has the rows of all its sequences in a rectangle, which every model takes. Fixed shapes are
replayed, on a GPU as graphs; programs of several forwards too.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outpace.cache import Cache, FixedCache, FixedRows, FixedWindow, KVCache, Slot, Window
from outpace.core import TargetOptions
from outpace.targets.base import checked_cache
from outpace.targets.batch import Batch
from outpace.targets.cpu.flat_attention import FlatCache, FlatWindow
from outpace.targets.gpu.fixed import FixedInputs, FixedShapes, Program, warm, width_of
from outpace.targets.gpu.graphs import Made, NotCaptured
from outpace.targets.inputs.changes import Addresses
from outpace.targets.inputs.device_rows import Trees, read_numbers
from outpace.targets.inputs.forward import CacheAdapter, laid_out, padded_states, rows_of
from outpace.targets.inputs.refusals import refuse_training
from outpace.targets.plan import StepPlan
from outpace.targets.rows import Output
from outpace.targets.step.modules import Modules
from outpace.targets.stock.uncached import UncachedForwards
from outpace.transfer import upload

_log = logging.getLogger(__name__)
_PADDED = 8  # rows of padding that cost less than to leave them out
_WINDOW_COST = 48  # rows of padding that cost as much, on a CPU, as to read the weights for a further window


class StockForwards(UncachedForwards):
    """A target that runs transformers' modules over windows of its cache."""

    options: TargetOptions
    plan: StepPlan
    _bare = False  # its logits are hidden states
    _fixed: FixedShapes | None = None
    _addresses: Addresses | None = None  # of all weights, which are in what ``_fixed`` has captured

    @abstractmethod
    def follow(self, begins: bool) -> None:
        """Follow changes of the model; ``begins``: a text begins."""

    def _run_stock(
        self,
        cache: KVCache,
        batch: Batch,
        hidden_layers: tuple[int, ...],
        states: Mapping[Slot, Tensor] | None,
    ) -> Output:
        modules, outputs = self._modules.over(batch), []
        windows = self._windows(cache, batch)
        if modules.flat is not None and _padding(windows) > _PADDED:
            return self._run_flat(modules.flat, windows, batch, hidden_layers, states)
        for window in windows:
            if len(windows) > 1:  # a window may cover the places of slots that feed rows in another
                fed = zip(window.slots, window.widths, strict=True)
                part, _ = batch.select([slot for slot, width in fed if width])
            else:
                part = batch
            if isinstance(window, FixedWindow) and (shapes := self._fixed) is not None:
                try:
                    made = self._run_fixed(shapes, modules, window, part, hidden_layers, states)
                except NotCaptured as error:
                    if self.options.static is True:
                        raise
                    self._launch(str(error))
                    return self._run_stock(cache, batch, hidden_layers, states)
                outputs.append(laid_out(window.slots, part, made.logits, 0, made.hidden, self._bare))
                self.plan.layouts["fixed"] += 1
            else:
                assert isinstance(window, Window)
                outputs.append(self._run_padded(modules, window, part, hidden_layers, states))
                self.plan.layouts["padded"] += 1
        return Output.join(outputs)

    def _windows(self, cache: KVCache, batch: Batch) -> Sequence[Window | FixedWindow]:
        """The windows of the cache that a forward writes."""
        widths = batch.width_by_slot
        if self._fixed is not None and len(batch.read) and isinstance(cache, FixedCache):
            width = width_of(len(widths), max(widths.values()))
            if width:
                return cache.begin_fixed(widths, width)
        groups = None
        if self.why_chains_only:
            groups = [[slot] for slot in widths]
        elif self.device.type == "cpu":
            groups = by_width(widths)
        return cache.begin(widths, self._modules.row_step, groups)

    # -- what some kinds of model need -------------------------------------------------------------------

    def _adapter(self, window: Window, batch: Batch) -> CacheAdapter:
        """A window as the model's cache."""
        return CacheAdapter(window, self._modules.cache_layers)

    def _rotated(self, window: Window, positions: Tensor) -> Tensor:
        """The positions that the model is given, from those in the text, [B, width]."""
        return positions

    def _adding(self, window: Window) -> AbstractContextManager[None]:
        """Context of a forward over a window."""
        return nullcontext()

    # -- forwards ----------------------------------------------------------------------------------------

    def _run_flat(
        self,
        modules: Modules,
        windows: Sequence[Window],
        batch: Batch,
        hidden_layers: tuple[int, ...],
        states: Mapping[Slot, Tensor] | None,
    ) -> Output:
        parts, count = [], len(batch.tokens)
        # Tokens and positions of all rows; those that fill them up to a multiple are read by nobody.
        both = torch.zeros((2, -(-count // modules.row_step) * modules.row_step), dtype=torch.long)
        for window in windows:
            padded, mask = modules.inputs(window, batch, self.device)
            part = FlatWindow.of(window, batch, mask)
            parts.append(part)
            both[:, part.rows.flatten()[part.real]] = padded.flatten(1)[:, part.real]
        inputs = {"input_ids": both[:1]}
        if states is not None:
            rows = torch.cat([states[slot] for slot in batch.slots])
            more = rows.new_zeros((both.shape[1] - count, rows.shape[1]))
            inputs = {"inputs_embeds": torch.cat([rows, more])[None]}
        cache = FlatCache(parts, modules.cache_layers, modules.masks.kinds_by_name)
        wanted = torch.from_numpy(batch.read).long() if len(batch.read) else 0
        made = modules.run(modules.step, inputs, cache.mask, both[1:], cache, wanted, hidden_layers)
        cache.check_attended()
        self.plan.layouts["flat"] += 1
        logits = made.logits[0] if len(batch.read) else None
        return batch.output(logits, {layer: rows[0, :count] for layer, rows in made.hidden.items()})

    def _run_padded(
        self,
        modules: Modules,
        window: Window,
        batch: Batch,
        hidden_layers: tuple[int, ...],
        states: Mapping[Slot, Tensor] | None,
    ) -> Output:
        both, mask = modules.inputs(window, batch, self.device)
        ids, positions = upload(both, self.device).unbind()
        reads = (batch.reads[slot] for slot in window.slots if slot is not None and slot in batch.rows)
        first = min((int(rows[0]) for rows in reads if len(rows)), default=window.width)
        wanted = window.width - first
        inputs = {"input_ids": ids} if states is None else {"inputs_embeds": padded_states(window, states)}
        with self._adding(window):
            made = modules.run(
                modules.step,
                inputs,
                mask,
                self._rotated(window, positions),
                self._adapter(window, batch),
                wanted,
                hidden_layers,
            )
        logits = made.logits[:, -wanted:] if wanted else None
        return laid_out(window.slots, batch, logits, first, made.hidden, self._bare)

    def _run_fixed(
        self,
        shapes: FixedShapes,
        modules: Modules,
        window: FixedWindow,
        batch: Batch,
        hidden_layers: tuple[int, ...],
        states: Mapping[Slot, Tensor] | None,
    ) -> Made:
        trees = modules is self._modules.trees
        forward = partial(self._compute_fixed, modules)
        rows = rows_of(window, batch.rows)
        return shapes.run(forward, window, rows, self._inputs, hidden_layers, states, trees)

    def _compute_fixed(self, modules: Modules, inputs: FixedInputs, hidden_layers: tuple[int, ...]) -> Made:
        """A forward of the model from the data in the inputs, without any data from the host."""
        rows = inputs.rows
        at = read_numbers(inputs.numbers, rows.width)
        written = rows.at(torch.where(at.trees.real, at.rows, rows.scratch))
        given = {"input_ids": at.tokens} if inputs.states is None else {"inputs_embeds": inputs.states}
        return self._compute(modules, written, given, at.trees, hidden_layers)

    def _step_fixed(self, rows: FixedRows, tokens: Tensor, trees: Trees) -> Tensor:
        """A forward of the model within a program (``gpu/fixed.py``)."""
        return self._compute(self._modules, rows, {"input_ids": tokens}, trees, ()).logits

    def _compute(
        self,
        modules: Modules,
        rows: FixedRows,
        given: Mapping[str, Tensor],
        trees: Trees,
        hidden_layers: tuple[int, ...],
    ) -> Made:
        mask = modules.masks.tree_mask(trees, rows.columns)
        cache = CacheAdapter(rows, modules.cache_layers)
        return modules.run(modules.step, given, mask, trees.positions, cache, rows.width, hidden_layers)

    # -- programs ----------------------------------------------------------------------------------------

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
                shapes.play(program, window, self.device, self._step_fixed)
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


def _padding(windows: Sequence[Window]) -> int:
    """Rows of padding that cost as much as to compute windows one by one."""
    rows = sum(window.width * len(window.widths) - sum(window.widths) for window in windows)
    return rows + _WINDOW_COST * (len(windows) - 1)


def by_width(widths: Mapping[Slot, int]) -> list[list[Slot]]:
    """Group slots that feed similar numbers of rows, so that windows and their padding cost the least."""
    slots = sorted(widths, key=lambda slot: widths[slot])
    most = widths[slots[-1]]
    if most * len(slots) <= sum(widths.values()) + _WINDOW_COST:
        return [slots]
    # The cost of the first slots, and where their last group begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for end, slot in enumerate(slots, 1):
        costs = (
            (best[start][0] + _WINDOW_COST + widths[slot] * (end - start), start) for start in range(end)
        )
        best.append(min(costs))
    groups = []
    while slots:
        start = best[len(slots)][1]
        groups.append(slots[start:])
        slots = slots[:start]
    return groups
