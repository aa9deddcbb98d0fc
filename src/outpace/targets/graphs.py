"""Forwards of fixed shapes, which a GPU replays as graphs: inputs and outputs stay where they are.

A step of a large model is some hundred short kernels, and launching them one by one takes longer than
running them. So a forward of one shape is captured once (``torch.cuda.CUDAGraph``, as transformers'
continuous batching does) and then replayed: what differs from step to step (tokens, parents, lengths) is
written into one buffer, from which all else is made on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.cache import FixedRows, Slot, Window
from outpace.core import OutpaceError
from outpace.targets.base import HiddenStates, Rows
from outpace.targets.masks import packed

# Forwards with more rows are bound by arithmetic, so that a graph gains nothing.
MOST_ROWS = 512
# Wider ones are chunks of prompts.
WIDEST = 128


class Made(NamedTuple):
    """Outputs of a forward of fixed shapes, which the next one writes over.

    Attributes:
        logits: [B, width, vocabulary].
        hidden: layer -> [B, width, hidden size].
    """

    logits: Tensor
    hidden: dict[int, Tensor]


class Runner(ABC):
    """Runs forwards of fixed shapes."""

    @abstractmethod
    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        """A function that repeats ``forward`` on the same tensors.

        Args:
            forward: reads and writes tensors that stay where they are, and reads nothing on the host. It may
                be called more than once: it writes the same rows again.
        """


class Eager(Runner):
    """Runs each operation anew."""

    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        return forward


class CudaGraphs(Runner):
    """One graph for each forward, all in one memory pool.

    The pool is shared because outputs hold until the next forward only. A graph runs the model as it was when
    it was captured: weights may change in place, modules may not be exchanged.

    Args:
        device: where everything is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                forward()  # compilers, autotuners and libraries set themselves up outside the graph
            try:
                # Other threads may go on using the device meanwhile.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    made = forward()
            except torch.OutOfMemoryError:  # which the engine handles
                raise
            except RuntimeError as error:
                raise OutpaceError(
                    f"the model's forward cannot be captured as a CUDA graph ({error}); leave static out, or "
                    "load a mixture of experts with experts_implementation='grouped_mm'"
                ) from error
            torch.cuda.current_stream().wait_stream(self._stream)

        def replay() -> Made:
            graph.replay()
            return made

        return replay


def runner_for(device: torch.device, devices: set[torch.device]) -> Runner:
    """Graphs where all of a model is on one CUDA device, operations one by one elsewhere.

    Args:
        device: where tokens go in.
        devices: where its weights and the rows of its layers are.
    """
    return CudaGraphs(device) if device.type == "cuda" and devices == {device} else Eager()


class Inputs:
    """Inputs of the forwards of one shape over one cache, always in the same place.

    Args:
        window: of the first such forward.
        nodes: most rows of a tree, those fed before included.
        size: hidden size, if rows are given by what goes into the first layer; otherwise 0.

    Attributes:
        rows: where the cache is written and read.
        numbers: what ``masks.packed`` makes of a forward's rows, on the device.
        states: what goes into the first layer, [B, width, size]; None where tokens go in.
    """

    def __init__(self, window: Window, nodes: int, like: HiddenStates, given: bool) -> None:
        self.width, self.nodes = window.width, nodes
        self.rows = FixedRows(window, like.device)
        self.numbers = torch.zeros(
            (window.stop, 3 + self.width + nodes), dtype=torch.long, device=like.device
        )
        shape = window.stop, window.width, like.size
        self.states = torch.zeros(shape, dtype=like.dtype, device=like.device) if given else None

    def fill(self, rows: Sequence[Rows], window: Window, states: Mapping[Slot, Tensor] | None) -> None:
        """Write a forward's rows, and the states given for them, [n, size] by slot."""
        numbers = torch.from_numpy(packed(rows, window.offsets, self.width, self.nodes))
        # Memory that is not pinned has been read when this returns, and nothing waits for the device.
        self.numbers.copy_(numbers, non_blocking=True)
        if self.states is not None:
            for place, slot in enumerate(window.slots):
                if slot is not None and states is not None and slot in states:
                    self.states[place, : len(states[slot])] = states[slot]
