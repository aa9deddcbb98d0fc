"""Hypothesis tries the same examples in every run, and none is too slow on a busy machine.

Where there is no GPU, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

settings.register_profile("outpace", derandomize=True, deadline=None, database=None)
settings.load_profile("outpace")
