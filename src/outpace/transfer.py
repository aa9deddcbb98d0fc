"""Data on their way between the host and a device.

No upload waits for CUDA, which has work of earlier steps queued for which the host would stop.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(data: Tensor | NDArray[Any] | Seq[Any], device: torch.device) -> Tensor:
    """Data of the host on a device; shares their memory if that is the CPU.

    Args:
        data: a tensor on the CPU, an array, or numbers in lists.
    """
    return _tensor(data).to(device, non_blocking=_reads_at_once(device))


def upload_into(target: Tensor, data: Tensor | NDArray[Any] | Seq[Any]) -> None:
    """Write data of the host into a tensor of the same shape."""
    target.copy_(_tensor(data), non_blocking=_reads_at_once(target.device))


def _tensor(data: Tensor | NDArray[Any] | Seq[Any]) -> Tensor:
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data)
    return data if isinstance(data, Tensor) else torch.tensor(data)


def _reads_at_once(device: torch.device) -> bool:
    """True if memory that is not pinned has been read when a copy that is not waited for returns.

    CUDA reads it then. MPS may read it later, when it holds something else.
    """
    return device.type == "cuda"


def last_device(model: Any) -> torch.device | None:
    """Device of a model's last weights, which its last layers run on; None without a model."""
    weights = [] if model is None else list(model.parameters())
    return weights[-1].device if weights and not weights[-1].is_meta else None


def finish(device: torch.device, last: torch.device | None = None) -> None:
    """Wait until a device has done what was asked of it, so that it can be timed.

    Args:
        last: the device of a model's last layer, if it is another.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(last or device)
    elif device.type == "mps":
        torch.mps.synchronize()


def gather(rows: Tensor, indices: Seq[int]) -> Tensor:
    """The rows at these indices; a view if the indices are consecutive."""
    first = indices[0]
    if list(indices) == list(range(first, first + len(indices))):
        return rows[first : first + len(indices)]
    return rows[upload(indices, rows.device)]


def scatter(target: Tensor, indices: Seq[int], rows: Tensor) -> None:
    """Write rows to these indices of a tensor; one copy if the indices are consecutive."""
    first = indices[0]
    if list(indices) == list(range(first, first + len(indices))):
        target[first : first + len(indices)] = rows
    else:
        target[upload(indices, target.device)] = rows


def widened(rows: Tensor) -> Tensor:
    """Rows in float64; on the CPU if they are on mps, which has no float64."""
    return (rows.cpu() if rows.device.type == "mps" else rows).double()
