"""Devices for tests: the CPU, and a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = pytest.param("cuda", marks=GPU)
DEVICES = ["cpu", CUDA]

# Triton's kernels run on a GPU, or in its interpreter, which is switched on where there is none.
INTERPRETER = pytest.param(
    "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the CUDA device")
)
TRITON_DEVICES = [INTERPRETER, CUDA]
# Whole models take a minute in the interpreter.
TRITON_MODELS = [pytest.param(*INTERPRETER.values, marks=[*INTERPRETER.marks, pytest.mark.slow]), CUDA]
