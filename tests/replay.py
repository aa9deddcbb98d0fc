"""A CUDA graph's stand-in on the CPU: operations are recorded once and played again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.targets.gpu.graphs import Made, Runner


class HostRead(AssertionError):
    """A recorded forward read a tensor on the host, or made a shape depend on one."""


class Recorder(TorchDispatchMode):
    """Records operations. What Python decided meanwhile is decided once and for all, as in a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[tuple[torch.Tensor, int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or _shaped_by_values(func, args):
            raise HostRead(f"{func} reads what a tensor holds")
        result = func(*args, **kwargs)
        known = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [
            (leaf, place)
            for place, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in known
        ]
        self.calls.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            results = tree_leaves(func(*args, **kwargs))
            for tensor, place in made:
                tensor.copy_(results[place])


def _shaped_by_values(func: Any, args: Any) -> bool:
    if func is torch.ops.aten.index.Tensor:  # so only where a mask is among the indices
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Replay(Runner):
    """Records each forward and plays it again.

    Attributes:
        captures: forwards recorded.
        replays: times that one was played again.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        self.captures += 1
        with Recorder() as recorder:
            made = forward()

        def replay() -> Made:
            self.replays += 1
            for tensor in (made.logits, *made.hidden.values()):
                tensor.fill_(torch.nan)  # so that what is not played again shows
            recorder.replay()
            return made

        return replay
