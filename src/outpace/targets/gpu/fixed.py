"""Forwards of fixed shapes: each is captured over its own inputs once per lane of a cache, and then replayed.

A lane that grows has other memory, over which its shapes are captured anew.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache import CacheFull, FixedCache, FixedRows, FixedWindow, Slot
from outpace.cache.lanes import LaneMemory, power_of_two
from outpace.core import TargetOptions, out_of_memory
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.gpu.graphs import Eager, Made, NotCaptured, Runner
from outpace.targets.hardware import total_bytes
from outpace.targets.inputs.device_rows import Trees, row_numbers
from outpace.targets.rows import HiddenStates, Rows
from outpace.transfer import upload_into

_log = logging.getLogger(__name__)
# Forwards with more rows are bound by arithmetic, so that a graph gains nothing.
_MOST_ROWS = 512
# Wider ones are chunks of prompts.
WIDEST = 128
_USUAL = 16  # rows of a step, at most, that are captured in advance
_SHARE = 16  # part of a GPU's memory that captured shapes may take
_GRAPH = 1 << 21  # bytes of a graph, besides its inputs and outputs


def resolved(options: TargetOptions, devices: set[torch.device], refused: str) -> tuple[TargetOptions, str]:
    """The options with static="auto" decided, and the reason if that is for shapes that are not fixed.

    Args:
        devices: of the model's weights.
        refused: why a forward of the model has no fixed shapes; empty if it may have.
    """
    if options.static != "auto":
        return options, ""
    kinds = {device.type for device in devices}
    reason = refused
    if kinds != {"cuda"}:
        reason = "it is for GPUs of CUDA"
    elif options.stock:
        reason = "stock steps run as transformers runs them"
    elif len(devices) > 1:
        reason = f"layers are on {len(devices)} devices"
    return (replace(options, static=False), reason) if reason else (options, "")


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
        self.nbytes = self.numbers.nbytes + (0 if self.states is None else self.states.nbytes)

    def fill(self, rows: Sequence[Rows], window: FixedWindow, states: Mapping[Slot, Tensor] | None) -> None:
        """Write a forward's rows, and the states given for them, [n, size] by slot."""
        upload_into(self.numbers, row_numbers(rows, window.offsets, self.width, self.nodes))
        if self.states is not None:
            for sequence, slot in enumerate(window.slots):
                if slot is not None and states is not None and slot in states:
                    self.states[sequence, : len(states[slot])] = states[slot]


class FixedStep(Protocol):
    """A forward of a model within a program."""

    def __call__(self, rows: FixedRows, tokens: Tensor, trees: Trees) -> Tensor:
        """Logits [B, width, vocabulary] of tokens [B, width], which are written to these rows."""


class Program(Protocol):
    """Several forwards of a model, and what is computed between them, as one graph.

    Attributes:
        widths: number of rows that they write for each slot.
        kept: number of the first ones that stay.
        key: equal for programs that are equal but for their numbers.
        forward: computes from the numbers, on the device, without data from the host. A graph holds it, so it
            holds nothing of one run.
    """

    @property
    def widths(self) -> Mapping[Slot, int]: ...
    @property
    def kept(self) -> Mapping[Slot, int]: ...
    @property
    def key(self) -> Hashable: ...
    @property
    def forward(self) -> Callable[[Tensor, FixedRows, FixedStep], Made]: ...

    def numbers(self, window: FixedWindow) -> NDArray[np.int64]:
        """What differs from run to run, [B, n]."""

    def take(self, window: FixedWindow, made: Made) -> None:
        """Copy what is needed of the outputs, which the next run overwrites."""


class _Numbers:
    def __init__(self, numbers: NDArray[np.int64], window: FixedWindow, device: torch.device) -> None:
        self.numbers = torch.zeros(numbers.shape, dtype=torch.long, device=device)
        self.nbytes, self.rows = self.numbers.nbytes, FixedRows(window, device)


class Inputs(Protocol):
    """Inputs of forwards of one shape, at fixed addresses."""

    @property
    def nbytes(self) -> int: ...


I = TypeVar("I", bound=Inputs)  # noqa: E741


@dataclass(eq=False)
class Captured:
    """A forward of one shape.

    Attributes:
        run: runs it.
        bytes: of its inputs and outputs, and of a graph.
        used: number of the last forward that ran it.
    """

    inputs: Any
    run: Callable[[], Made]
    bytes: int = _GRAPH
    used: int = 0


# Shape of a forward -> what is captured.
_Known = dict[tuple[Any, ...], Captured]


class FixedShapes:
    """A target's forwards of fixed shapes.

    Args:
        runner: captures and replays them.
        most: bytes that captured shapes may take, above which those unused for longest are dropped; None for
            no limit.

    Attributes:
        known: memory of a lane -> shape -> what is captured; dropped with the memory.
    """

    def __init__(self, runner: Runner, most: int | None = None) -> None:
        self.known: weakref.WeakKeyDictionary[LaneMemory, _Known] = weakref.WeakKeyDictionary()
        self.runner = runner
        self.most = most
        self._beside = False
        self._lent: weakref.WeakSet[FixedShapes] = weakref.WeakSet()
        self._forwards = itertools.count()

    @property
    def captures(self) -> bool:
        """True if forwards become graphs; False if they are launched one kernel at a time."""
        return not isinstance(self.runner, Eager)

    def anew(self) -> FixedShapes:
        """The same for another model: nothing captured."""
        return FixedShapes(self.runner, self.most)

    def lend(self) -> FixedShapes:
        """Those of a module beside the model, which are dropped with these; their outputs stay valid."""
        lent = FixedShapes(self.runner.another(), self.most)
        lent._beside = True
        self._lent.add(lent)
        return lent

    def drop(self) -> None:
        for shapes in (self, *self._lent):
            shapes.known.clear()

    def run(
        self,
        forward: Callable[[FixedInputs, tuple[int, ...]], Made],
        window: FixedWindow,
        rows: Sequence[Rows],
        like: HiddenStates,
        hidden_layers: tuple[int, ...],
        states: Mapping[Slot, Tensor] | None,
        trees: bool = False,
    ) -> Made:
        """Run a forward over one window.

        Args:
            forward: computes from inputs the logits, and hidden states of layers, without data from the host.
            rows: the feeds, in the window's order.
            like: size, dtype and device of hidden states.
            states: inputs of the first layer by slot, [n, size]; None if the inputs are tokens.
            trees: it runs on the modules for trees.
        """
        nodes = power_of_two(window.width + max(len(row.fed) for row in rows))
        shape = (window.stop, window.width, window.columns, nodes, hidden_layers, states is not None, trees)
        return self.replay(
            window.lane.memory,
            shape,
            lambda: FixedInputs(window, nodes, like, states is not None),
            lambda inputs: inputs.fill(rows, window, states),
            lambda inputs: forward(inputs, hidden_layers),
        )

    def play(self, program: Program, window: FixedWindow, device: torch.device, step: FixedStep) -> None:
        """Run a program over one window.

        Args:
            device: of the model's tokens.
        """
        numbers, forward = program.numbers(window), program.forward
        made = self.replay(
            window.lane.memory,
            (program.key, window.columns, numbers.shape),
            lambda: _Numbers(numbers, window, device),
            lambda inputs: upload_into(inputs.numbers, numbers),
            lambda inputs: forward(inputs.numbers, inputs.rows, step),
        )
        program.take(window, made)

    def replay(
        self,
        memory: LaneMemory,
        shape: tuple[Any, ...],
        make: Callable[[], I],
        fill: Callable[[I], None],
        forward: Callable[[I], Made],
    ) -> Made:
        """Run a forward of a shape, which is captured if it was not yet.

        Args:
            memory: what it is captured over.
            make: makes its inputs.
            fill: writes what differs from forward to forward into them.
            forward: computes from them, without data from the host.
        """
        shapes = self.known.setdefault(memory, {})
        captured = shapes.get(shape)
        if captured is not None:
            fill(captured.inputs)
            captured.used = next(self._forwards)
            return captured.run()
        inputs = make()
        fill(inputs)
        captured = Captured(inputs, self._capture(partial(forward, inputs)))
        captured.used = next(self._forwards)
        shapes[shape] = captured
        made = captured.run()
        captured.bytes += made.nbytes + inputs.nbytes
        self._limit(captured)
        return made

    def _capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        """Capture a forward; if memory runs out, once more without what was captured before."""
        try:
            return self.runner.capture(forward)
        except NotCaptured as error:
            if not self._beside:  # then the target goes on without graphs
                raise
            _log.warning("a drafter's module on this GPU is launched one kernel at a time: %s", error)
            self.runner = Eager()
            return forward
        except Exception as error:
            if not (out_of_memory(error) and any(self.known.values())):
                raise
        for shapes in self.known.values():
            shapes.clear()
        return self.runner.capture(forward)

    def _limit(self, newest: Captured) -> None:
        """Drop the shapes that were unused for longest, as long as all take too much memory."""
        if self.most is None:
            return
        every = [(one, shapes, key) for shapes in self.known.values() for key, one in shapes.items()]
        total = sum(one.bytes for one, *_ in every)
        for one, shapes, key in sorted(every, key=lambda each: each[0].used):
            if total <= self.most or one is newest:
                return
            del shapes[key]
            total -= one.bytes


def shapes_for(target: TargetModel) -> FixedShapes | None:
    """What captures the forwards of a drafter's own module, beside its target; None if it is not on CUDA."""
    if target.hidden.device.type != "cuda":
        return None
    return target.shapes_beside() or FixedShapes(Eager())


def most_bytes(device: torch.device) -> int | None:
    """The bytes of a device that captured shapes may take; None for no limit."""
    total = total_bytes(device) if device.type == "cuda" else None
    return None if total is None else total // _SHARE


def warm(target: TargetModel, cache: FixedCache, slots: int, layers: Sequence[int], trees: bool) -> None:
    """Capture steps of 1 to ``_USUAL`` rows for batches of up to ``slots`` sequences, which must be free.

    Args:
        layers: as ``hidden_layers`` of steps.
        trees: forwards with branches run on modules of their own.
    """
    taken: list[Slot] = []
    try:
        with suppress(CacheFull):  # then requests will wait, too
            while len(taken) < slots:
                taken.append(cache.allocate(cache.usual_rows))
        for count in (1 << power for power in range(len(taken).bit_length())):
            for width in (1 << power for power in range(_USUAL.bit_length())):
                if not width_of(count, width):
                    continue
                star = [Rows([0] * width, (-1, *[0] * (width - 1)))] if trees and width > 2 else []
                for rows in (Rows([0] * width), *star):
                    target.forward(cache, Batch.of(dict.fromkeys(taken[:count], rows)), layers)
                    cache.keep({})
    finally:
        for slot in taken:
            cache.free(slot)


def width_of(slots: int, width: int) -> int:
    """Width of a forward of fixed shapes of up to ``width`` rows for each slot; 0 if that does not pay."""
    width = power_of_two(width)
    pays = width <= WIDEST and power_of_two(slots) * width <= _MOST_ROWS
    return width if pays else 0
