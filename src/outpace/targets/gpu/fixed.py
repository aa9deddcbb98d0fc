"""Forwards of fixed shapes: each shape is captured over its own inputs once per cache, and then replayed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.cache import FixedRows, FixedWindow, Slot, StaticCache
from outpace.cache.lanes import power_of_two
from outpace.targets.gpu.graphs import Made, Runner
from outpace.targets.inputs.device_rows import row_numbers
from outpace.targets.rows import HiddenStates, Rows
from outpace.transfer import upload_into

# Forwards with more rows are bound by arithmetic, so that a graph gains nothing.
_MOST_ROWS = 512
# Wider ones are chunks of prompts.
_WIDEST = 128
_MOST_SHAPES = 256  # that the compiler compiles


class FixedInputs:
    """Inputs of the forwards of one shape over one cache, at fixed addresses.

    Args:
        window: the window of the first such forward.
        nodes: maximum number of rows of a tree, including those fed before.
        like: size, dtype and device of hidden states.
        by_states: rows are given as inputs of the first layer, not as tokens.

    Attributes:
        rows: the rows of the cache that are written and read.
        numbers: the array of ``row_numbers`` for a forward's rows, on the device.
        states: inputs of the first layer, [B, width, size]; None if the inputs are tokens.
    """

    def __init__(self, window: FixedWindow, nodes: int, like: HiddenStates, by_states: bool) -> None:
        self.width, self.nodes = window.width, nodes
        self.rows = FixedRows(window, like.device)
        self.numbers = torch.zeros(
            (window.stop, 3 + self.width + nodes), dtype=torch.long, device=like.device
        )
        shape = window.stop, window.width, like.size
        self.states = torch.zeros(shape, dtype=like.dtype, device=like.device) if by_states else None

    def fill(self, rows: Sequence[Rows], window: FixedWindow, states: Mapping[Slot, Tensor] | None) -> None:
        """Write a forward's rows, and the states given for them, [n, size] by slot."""
        upload_into(self.numbers, row_numbers(rows, window.offsets, self.width, self.nodes))
        if self.states is not None:
            for sequence, slot in enumerate(window.slots):
                if slot is not None and states is not None and slot in states:
                    self.states[sequence, : len(states[slot])] = states[slot]


# Shape of a forward -> its inputs, and the function that runs it.
_Known = dict[tuple[Any, ...], tuple[FixedInputs, Callable[[], Made]]]


class FixedShapes:
    """A target's forwards of fixed shapes.

    Args:
        runner: captures and replays them.
        compiled: options of ``torch.compile`` for the model; None does not compile it.

    Attributes:
        known: cache -> shape -> inputs, and the function that runs such a forward; dropped with the cache.
    """

    def __init__(self, runner: Runner, compiled: Mapping[str, Any] | None) -> None:
        self.known: weakref.WeakKeyDictionary[StaticCache, _Known] = weakref.WeakKeyDictionary()
        self.runner = runner
        self._options = compiled
        self._compiled: Any = None

    def anew(self) -> FixedShapes:
        """The same for another model: nothing captured, nothing compiled."""
        return FixedShapes(self.runner, self._options)

    def run(
        self,
        forward: Callable[[FixedInputs, tuple[int, ...]], Made],
        cache: StaticCache,
        window: FixedWindow,
        rows: Sequence[Rows],
        like: HiddenStates,
        hidden_layers: tuple[int, ...],
        states: Mapping[Slot, Tensor] | None,
    ) -> Made:
        """Run a forward over one window.

        Args:
            forward: computes from inputs the logits, and hidden states of layers, without data from the host.
            rows: the feeds, in the window's order.
            like: size, dtype and device of hidden states.
            states: inputs of the first layer by slot, [n, size]; None if the inputs are tokens.
        """
        nodes = power_of_two(window.width + max(len(row.fed) for row in rows))
        shape = (window.stop, window.width, window.columns, nodes, hidden_layers, states is not None)
        shapes = self.known.setdefault(cache, {})
        if shape in shapes:
            inputs, run = shapes[shape]
            inputs.fill(rows, window, states)
        else:
            inputs = FixedInputs(window, nodes, like, states is not None)
            inputs.fill(rows, window, states)
            run = self.runner.capture(partial(forward, inputs, hidden_layers))
            shapes[shape] = inputs, run
        return run()

    def compiled(self, model: Any) -> Any:
        """The model, compiled if that was requested."""
        if self._options is None:
            return model
        if self._compiled is None:
            compiled: Any = torch.compile(model, dynamic=False, **self._options)

            def run(**arguments: Any) -> Any:
                # Beyond its limit the compiler would not compile further shapes, and only warn.
                with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
                    return compiled(**arguments)

            self._compiled = run
        return self._compiled


def width_of(cache: StaticCache, width: int) -> int:
    """Width of a forward of fixed shapes that feeds up to ``width`` rows per slot; 0 if that does not pay."""
    width = power_of_two(width)
    pays = width <= _WIDEST and power_of_two(len(cache)) * width <= _MOST_ROWS
    return width if pays else 0
