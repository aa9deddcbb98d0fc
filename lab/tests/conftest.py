"""Settings and hooks of all tests, and one folder for the drafters that the laboratory's tests train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from running import pytest_collection, pytest_runtest_setup

__all__ = ["pytest_collection", "pytest_runtest_setup", "trained_for_all"]


@pytest.fixture(scope="session", autouse=True)
def trained_for_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share the drafters of ``taught`` among the processes of a run; pytest removes them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    folder.mkdir(exist_ok=True)
    os.environ["OUTPACE_TRAINED"] = str(folder)
    return folder
