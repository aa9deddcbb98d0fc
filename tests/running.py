"""What every run of tests has, outpace's and the laboratory's: their ``conftest.py`` imports it.

Hypothesis tries the same examples in every run, and none is too slow on a busy machine.

Self-tests of the same model are recorded within a run, except where tests break targets, or test the record.

Garbage collections leave out the modules and the tests: half a million objects, which stay to the end.

Where there is no GPU, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings

_TESTS = [Path(__file__).parent, Path(__file__).parents[1] / "lab" / "tests"]
_UNRECORDED = [
    tests / name
    for tests in _TESTS
    for name in ("unit/native", "unit/targets", "llamacpp", "lossless", "zoo")
]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

settings.register_profile("outpace", derandomize=True, deadline=None, database=None)
settings.load_profile("outpace")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze what is there when the tests are collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # extensions report what is there after the last collection


@lru_cache(maxsize=1)
def _files(config: pytest.Config) -> Path:
    """Make all temporary files in pytest's folder: later runs remove it, also after one that was killed."""
    folder: Path = config._tmp_path_factory.mktemp("files")  # type: ignore[attr-defined]
    tempfile.tempdir = str(folder)
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose the folder of the record before any fixture loads a model; none where no self-test is spared."""
    tested = _files(item.config) / "tested"
    unrecorded = any(item.path.is_relative_to(folder) for folder in _UNRECORDED)
    os.environ["OUTPACE_TESTED"] = "" if unrecorded else str(tested)
