"""Layouts of a forward: how the rows of its windows are given to the model, in ``LAYOUTS``, the first first.

Fixed shapes are replayed. Rows in a line have no padding in the model's layers; several windows are mixed in
one line. A padded window has all its sequences' rows in a rectangle, which every model takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.cache import FixedRows, FixedWindow, KVCache, Slot, Window
from outpace.targets.batch import Batch, Building, drawn_from, laid_out
from outpace.targets.cpu.line_attention import line_attention
from outpace.targets.gpu.fixed import FixedInputs
from outpace.targets.gpu.graphs import Made
from outpace.targets.inputs.config import family
from outpace.targets.inputs.device_rows import Trees, read_numbers
from outpace.targets.inputs.forward import CacheAdapter, padded_states, rows_of
from outpace.targets.inputs.line import WINDOW_COST, Line
from outpace.targets.inputs.refusals import why_untouchable
from outpace.targets.inputs.surgery import exchange
from outpace.targets.rows import Output, Rows
from outpace.targets.step.agreement import agree
from outpace.targets.step.modules import Modules
from outpace.transfer import upload

if TYPE_CHECKING:
    from outpace.targets.stock.causal import CausalTarget
    from outpace.targets.stock.fixed_steps import FixedSteps

_log = logging.getLogger(__name__)


class Call(NamedTuple):
    """A forward that is asked for.

    Attributes:
        batch, hidden_layers: as for ``TargetModel.forward``.
        states: slot -> [its rows, hidden size], instead of the tokens' embeddings.
        lines: its rows may be in a line.
        modules: what it runs on.
    """

    cache: KVCache
    batch: Batch
    hidden_layers: tuple[int, ...]
    states: Mapping[Slot, Tensor] | None
    lines: bool
    modules: Modules

    def first(self, window: Window) -> int:
        """The first row of a window's slots that is read; its width if none is."""
        reads = (
            self.batch.reads[slot] for slot in window.slots if slot is not None and slot in self.batch.rows
        )
        return min((int(rows[0]) for rows in reads if len(rows)), default=window.width)


class Taken(NamedTuple):
    """The first windows of a forward, as a layout runs them.

    Attributes:
        windows: their number.
        run: returns the outputs of their slots.
    """

    windows: int
    run: Callable[[], Output]


Windows = Sequence[Window | FixedWindow]
# Takes the first of the windows that are left, or nothing.
Layout = Callable[["CausalTarget", Call, Windows], Taken | None]


def fixed(target: CausalTarget, call: Call, windows: Windows) -> Taken | None:
    """Fixed shapes (``gpu/fixed.py``)."""
    window, shapes = windows[0], target._fixed
    if shapes is None or not isinstance(window, FixedWindow):
        return None

    def run() -> Output:
        rows, forward = rows_of(window, call.batch.rows), partial(_compute_fixed, target, call.modules)
        trees = call.modules is target._modules.trees
        made = shapes.run(forward, window, rows, target._inputs, call.hidden_layers, call.states, trees)
        return laid_out(window.slots, call.batch, made.logits, 0, made.hidden, target._bare)

    return Taken(1, run)


def mixed_line(target: CausalTarget, call: Call, windows: Windows) -> Taken | None:
    """The rows of all windows in a line."""
    growing = [window for window in windows if isinstance(window, Window)]
    if not (call.lines and target._modules.mixes) or len(growing) < 2:
        return None
    return Taken(len(growing), partial(_compute_line, target, call, _line_of(target, growing)))


def line(target: CausalTarget, call: Call, windows: Windows) -> Taken | None:
    """The rows of one window in a line, if that leaves out enough padding."""
    window = windows[0]
    if not call.lines or not isinstance(window, Window):
        return None
    in_line = _line_of(target, [window])
    return Taken(1, partial(_compute_line, target, call, in_line)) if in_line.pays else None


def padded(target: CausalTarget, call: Call, windows: Windows) -> Taken | None:
    """The rows of one window, padded to its width."""
    window = windows[0]
    return Taken(1, partial(_compute_padded, target, call, window)) if isinstance(window, Window) else None


LAYOUTS: Mapping[str, Layout] = {"fixed": fixed, "mixed line": mixed_line, "line": line, "padded": padded}


def _line_of(target: CausalTarget, windows: Sequence[Window]) -> Line:
    return Line(windows, target._modules.row_step)


def _compute_padded(target: CausalTarget, call: Call, window: Window) -> Output:
    """A forward of the model over one window."""
    modules = call.modules
    both, mask = modules.inputs(window, call.batch, target.device)
    ids, positions = upload(both, target.device).unbind()
    first = call.first(window)
    wanted = window.width - first
    states = call.states
    inputs = {"input_ids": ids} if states is None else {"inputs_embeds": padded_states(window, states)}
    with target._adding(window):
        made = modules.run(
            modules.step,
            inputs,
            mask,
            target._rotated(window, positions),
            target._adapter(window, call),
            wanted,
            call.hidden_layers,
        )
    logits = made.logits[:, -wanted:] if wanted else None
    return laid_out(window.slots, call.batch, logits, first, made.hidden, target._bare)


def _compute_line(target: CausalTarget, call: Call, in_line: Line) -> Output:
    """A forward of the model over windows whose rows are in a line."""
    modules = target._modules
    each = (modules.inputs(window, call.batch, target.device) for window in in_line.windows)
    inputs, masks = zip(*each, strict=True)
    ids, positions = in_line.inputs(inputs).unbind()
    cache = CacheAdapter(in_line, modules.cache_layers)
    part, _ = call.batch.select(in_line.slots)
    read = torch.from_numpy(part.read.astype(np.int64))
    made = modules.run(
        modules.line,
        {"input_ids": ids},
        in_line.mask(masks, cache.shared),
        positions,
        cache,
        read if len(read) else 0,
        call.hidden_layers,
    )
    logits = made.logits[0] if len(read) else None
    if logits is not None and not target._bare:
        logits = drawn_from(logits)
    return part.output(logits, {layer: rows[0] for layer, rows in made.hidden.items()})


def _compute_fixed(
    target: CausalTarget, modules: Modules, inputs: FixedInputs, hidden_layers: tuple[int, ...]
) -> Made:
    """A forward of the model from the data in the inputs, without any data from the host."""
    rows = inputs.rows
    at = read_numbers(inputs.numbers, rows.width)
    written = rows.at(torch.where(at.trees.real, at.rows, rows.scratch))
    given = {"input_ids": at.tokens} if inputs.states is None else {"inputs_embeds": inputs.states}
    return _run_fixed(target, modules, written, given, at.trees, hidden_layers)


def step_fixed(target: FixedSteps, rows: FixedRows, tokens: Tensor, trees: Trees) -> Tensor:
    """A forward of the model within a program (``gpu/fixed.py``)."""
    return _run_fixed(target, target._modules, rows, {"input_ids": tokens}, trees, ()).logits


def _run_fixed(
    target: FixedSteps,
    modules: Modules,
    rows: FixedRows,
    given: Mapping[str, Tensor],
    trees: Trees,
    hidden_layers: tuple[int, ...],
) -> Made:
    assert target._fixed is not None
    return modules.run(
        target._fixed.compiled(modules.step),
        given,
        modules.masks.tree_mask(trees, rows.columns),
        trees.positions,
        CacheAdapter(rows, modules.cache_layers),
        rows.width,
        hidden_layers,
    )


def try_lines(target: CausalTarget) -> None:
    """Give a target's modules a copy of the step for rows in a line, if it takes them.

    A small forward shows it: of a tree beside a row, and of rows of a prompt that are wide enough for a
    window of their own.
    """
    modules = target._modules
    attention = line_attention(modules.step)
    if attention is None or why_untouchable(modules.step):
        return
    copied = exchange(modules.step, lambda _: None, attention)
    nodes = max(5, 4 * modules.row_step)
    tree = Rows([node % 2 for node in range(nodes)], (-1, 0, 0, 1, 2, *range(4, nodes - 1)))
    prompt = Rows([node % 2 for node in range(nodes + WINDOW_COST)])
    for feeds in ([tree, Rows([1]), prompt], [tree, Rows([1])]):
        modules.line, modules.mixes = None, prompt in feeds
        cache = target.new_cache(slots=3, length=nodes + WINDOW_COST)
        rows = {cache.allocate(): row for row in feeds}
        building = Building()
        for slot, row in rows.items():
            building.add(slot, row, read=nodes if row is prompt else 0)
        batch = building.made()
        try:
            beside = target.forward(cache, batch)
            modules.line = copied
            in_line = target.forward(cache, batch)
        except Exception:  # some code of the family's own may not take keys of more sequences than rows
            _log.debug("%s does not support rows in a line", family(target.model), exc_info=True)
            modules.line = None
            continue
        expected, found = (torch.cat([o.logits_of(slot) for slot in rows]) for o in (beside, in_line))
        if torch.equal(found, expected):
            return
        modules.line = None
        if not target.bit_exact:
            alone = [target.forward(cache, batch.select([slot])[0]).logits_of(slot) for slot in rows]
            if agree(found, expected, torch.cat(alone)):
                modules.line = copied
                return
