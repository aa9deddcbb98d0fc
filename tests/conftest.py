"""Hypothesis tries the same examples in every run, and none is too slow on a busy machine.

Self-tests are not recorded, except in the tests of the record.

Where there is no GPU, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ["OUTPACE_TESTED"] = ""  # no test is spared because an earlier one passed

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

settings.register_profile("outpace", derandomize=True, deadline=None, database=None)
settings.load_profile("outpace")


@pytest.fixture(scope="session", autouse=True)
def trained_for_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share the drafters of ``lossless.trained`` among the processes of a run; pytest removes them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    folder.mkdir(exist_ok=True)
    os.environ["OUTPACE_TRAINED"] = str(folder)
    return folder
