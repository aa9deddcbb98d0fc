"""Runners of forwards of fixed shapes, which a GPU replays as graphs: their tensors have fixed addresses.

A step of a large model is some hundred short kernels, and launching them one by one takes longer than
running them. So a forward of one shape is captured once (``torch.cuda.CUDAGraph``, as transformers'
continuous batching does) and then replayed: what differs from step to step (tokens, parents, lengths) is
written into one buffer, from which all else is made on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core import OutpaceError


class Made(NamedTuple):
    """Outputs of a forward of fixed shapes, which the next one overwrites.

    Attributes:
        logits: [B, width, vocabulary].
        hidden: layer -> [B, width, hidden size].
    """

    logits: Tensor
    hidden: dict[int, Tensor]

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + sum(states.nbytes for states in self.hidden.values())


class NotCaptured(OutpaceError):
    """A forward cannot be captured; the message names the reason."""


class Runner(ABC):
    """Runner of forwards of fixed shapes."""

    @abstractmethod
    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        """A function that repeats ``forward`` on the same tensors.

        Args:
            forward: reads and writes tensors at fixed addresses, and reads nothing on the host. It may
                be called more than once: it writes the same rows again.
        """

    def another(self) -> Runner:
        """One whose outputs stay valid while this one's forwards run."""
        return self


class Eager(Runner):
    """Runner that executes the operations one by one."""

    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        return forward


class CudaGraphs(Runner):
    """One graph per forward, all in one memory pool.

    The pool is shared because outputs are valid only until the next forward. A graph runs the model as it was
    when captured: weights may change in place, modules may not be replaced.

    Args:
        device: device of all tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def another(self) -> Runner:
        return CudaGraphs(self._device)

    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                forward()  # compilers, autotuners and libraries set themselves up outside the graph
            try:
                # Other threads may continue to use the device meanwhile.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    made = forward()
            except torch.OutOfMemoryError:  # which the engine handles
                raise
            except RuntimeError as error:
                raise NotCaptured(
                    f"the model's forward cannot be captured as a CUDA graph ({error}); leave static out, or "
                    "load a mixture of experts with experts_implementation='grouped_mm'"
                ) from error
            torch.cuda.current_stream().wait_stream(self._stream)

        def replay() -> Made:
            graph.replay()
            return made

        return replay


def runner_for(device: torch.device, devices: set[torch.device]) -> Runner:
    """A runner with graphs if all of a model is on one CUDA device, otherwise one without.

    Args:
        device: device of the input tokens.
        devices: devices of its weights and its layers' rows.
    """
    return CudaGraphs(device) if device.type == "cuda" and devices == {device} else Eager()
