"""A kernel that writes a number, to see whether kernels run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write(Out):  # type: ignore[no-untyped-def]
    tl.store(Out, 1)


def run(device: str = "cuda") -> None:
    """Compile the kernel and launch it.

    Raises:
        RuntimeError: it has not run.
    """
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _write[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel wrote nothing")
