"""What the layers of one forward have in common.

transformers gives an attention function a layer's keys and its mask, and nothing else of a forward. So what
belongs to these is found by them, in the object of the forward that runs in this thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor


class ForwardContext:
    """Values that belong to tensors of a forward; a copy of a tensor has none.

    Attributes:
        states: what computes its recurrent layers (``states.py``); None if these are computed as they are.
        flat: what computes its attention, if its rows are flat (``cpu/flat_attention.py``).
    """

    def __init__(self) -> None:
        self.states: Any = None
        self.flat: Any = None
        self._values: dict[int, tuple[Tensor, Any]] = {}

    def put(self, tensor: Tensor, value: Any) -> None:
        """Add the value of a tensor."""
        self._values[id(tensor)] = tensor, value  # which keeps the tensor, so that no other gets its id

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        """The value of a tensor."""
        return self._values.get(id(tensor), (tensor, default))[1]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the forward whose object this is."""
        before = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(before)


_RUNNING: ContextVar[ForwardContext | None] = ContextVar("outpace_forward", default=None)


def forward_context() -> ForwardContext:
    """The object of the forward that runs in this thread; a new one if none does, as in a self-test."""
    return _RUNNING.get() or ForwardContext()
