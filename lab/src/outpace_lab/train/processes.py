"""Distributed training: one process per device, sharing work and agreeing on values."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import torch

from outpace.core import OutpaceError, load_extra

T = TypeVar("T")


class Processes:
    """This process among those that a launcher such as ``torchrun`` started; the only one without a launcher.

    Attributes:
        index: the index of this process, from 0.
        count: the number of processes.

    Args:
        device: the device it trains on. All processes train on devices of one kind.

    Raises:
        OutpaceError: accelerate is missing; or a launcher gave this process another GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._state = load_extra("accelerate", "training", "train", "outpace-lab").PartialState(
            cpu=device.type == "cpu"
        )
        self.index = int(self._state.process_index)
        self.count = int(self._state.num_processes)
        own = self._state.device
        if self._state.use_distributed and device.type == own.type != "cpu" and device != own:
            raise OutpaceError(
                f"the launcher gave this process {own}, and the model is on {device}; leave --device out, or "
                "start a single process without a launcher"
            )

    @property
    def first(self) -> bool:
        """True in the process that writes and reports."""
        return self.index == 0

    def share(self, of: Seq[T]) -> tuple[int, Seq[T]]:
        """The start and the items of this process's part; all parts are about equally long."""
        start, stop = (len(of) * place // self.count for place in (self.index, self.index + 1))
        return start, of[start:stop]

    def gather(self, found: list[T]) -> list[T]:
        """The items of all processes, in the order of the processes."""
        from accelerate.utils import gather_object

        gathered: list[T] = gather_object(found)
        return gathered

    def agree(self, value: T) -> T:
        """The value of the first process."""
        from accelerate.utils import broadcast_object_list

        held: list[Any] = [value]
        agreed: T = broadcast_object_list(held)[0]
        return agreed

    def wait(self) -> None:
        """Wait for all processes."""
        self._state.wait_for_everyone()


def own_device(device: str | None) -> str | None:
    """The device for this process; a GPU of its own if a launcher started several processes.

    Args:
        device: the requested device; None for any. One with a number is returned unchanged.
    """
    number = os.environ.get("LOCAL_RANK")
    if number is None or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{number}"
