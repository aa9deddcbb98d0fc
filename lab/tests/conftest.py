"""The settings of outpace's own tests, and one folder for the drafters that the tests train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("outpace", derandomize=True, deadline=None, database=None)
settings.load_profile("outpace")


@pytest.fixture(scope="session", autouse=True)
def trained_for_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share the drafters of ``taught`` among the processes of a run; pytest removes them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    folder.mkdir(exist_ok=True)
    os.environ["OUTPACE_TRAINED"] = str(folder)
    return folder
