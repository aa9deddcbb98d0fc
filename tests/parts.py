"""Some of a test's cases by default, the rest as slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``, of which all after the first ``count`` are slow tests."""
    every = list(cases)
    return every[:count] + [pytest.param(case, marks=pytest.mark.slow) for case in every[count:]]
