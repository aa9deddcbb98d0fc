"""Addresses for functions in C, which check nothing: only of memory whose dtype and shape are known.

Every pointer into a compiled library comes from here. What is counted at a call is checked at the call, and
what never changes (a layer's weights) when it is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import OutpaceError


def pointer(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Address of a tensor that has this dtype and shape, without gaps, in the memory of the CPU.

    Raises:
        OutpaceError: it differs.
    """
    if tensor.dtype is not dtype or tensor.shape != shape or not (tensor.is_contiguous() and tensor.is_cpu):
        raise _refusal(tensor, dtype, shape)
    return tensor.data_ptr()


def pointer_or_null(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """``pointer``; None for None."""
    return None if tensor is None else pointer(tensor, dtype, *shape)


def rows_pointer(buffer: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Address of a buffer [sequences, heads, rows, size] in which a head's rows are one after the other.

    Args:
        shape: its shape; it may have more sequences and more rows.
        strides: of the sequences and of the heads, in elements.

    Raises:
        OutpaceError: it differs.
    """
    sequences, heads, rows, size = shape
    found = buffer.shape
    fits = len(found) == 4 and found[0] >= sequences and found[2] >= rows
    if (
        not (fits and buffer.is_cpu)
        or buffer.dtype is not dtype
        or (found[1], found[3]) != (heads, size)
        or buffer.stride() != (*strides, size, 1)
    ):
        raise _refusal(buffer, dtype, shape)
    return buffer.data_ptr()


def row_addresses(matrices: Sequence[Tensor], dtype: torch.dtype, size: int) -> NDArray[np.uint64]:
    """Addresses of the rows of matrices [rows, size], one after the other; a row has no gaps.

    Raises:
        OutpaceError: a matrix has another dtype or other rows, or is not in the memory of the CPU.
    """
    found = []
    for matrix in matrices:
        if matrix.dim() != 2 or matrix.dtype is not dtype or not matrix.is_cpu or matrix.shape[1] != size:
            raise _refusal(matrix, dtype, (-1, size))
        check(size < 2 or matrix.stride(1) == 1, "rows without gaps")
        step = matrix.stride(0) * matrix.itemsize
        found.append(matrix.data_ptr() + np.arange(len(matrix), dtype=np.int64) * step)
    return np.concatenate(found).astype(np.uint64)


def struct_pointer(struct: ctypes.Structure) -> int:
    """Address of a struct, which is valid as long as that object is."""
    return ctypes.addressof(struct)


def addresses(pointers: Sequence[int]) -> NDArray[np.uint64]:
    """Addresses that ``pointer`` or ``rows_pointer`` gave, for a function that takes several at once."""
    return np.array(pointers, dtype=np.uint64)


def address(array: NDArray[Any], dtype: Any, *shape: int) -> int:
    """Address of a NumPy array that has this dtype and shape, without gaps.

    Raises:
        OutpaceError: it differs.
    """
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise _refusal(array, dtype, shape)
    return torch.from_numpy(array).data_ptr()  # NumPy's own ways to it take twice as long


def check(fits: bool, what: str) -> None:
    """Refuse counts that a function in C would trust.

    Raises:
        OutpaceError: they do not fit; the message states what would.
    """
    if not fits:
        raise OutpaceError(f"a compiled function would read outside of its arrays: it takes {what}")


def _refusal(found: Any, dtype: Any, shape: Sequence[int]) -> OutpaceError:
    """The error for a tensor or an array that is not what a function takes."""
    place = "" if getattr(found, "is_cpu", True) else f" on {found.device}"
    strides = found.stride() if isinstance(found, Tensor) else found.strides
    return OutpaceError(
        f"a compiled function takes {list(shape)} in {dtype} without gaps on a CPU, not {list(found.shape)} "
        f"in {found.dtype}{place} with strides {list(strides)}"
    )
