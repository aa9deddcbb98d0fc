"""The tests that are run once per instruction set."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpus import TESTS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("file", TESTS)
def test_a_file_of_tests_is_there(file: str) -> None:
    assert (ROOT / file).is_file()
