"""Some of a test's cases by default, the rest as slow tests; tests of what newer transformers have."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

import pytest
import transformers


def since(version: str) -> pytest.MarkDecorator:
    """Skip tests on transformers before a version, ``major.minor``."""
    needed, found = (tuple(map(int, one.split(".")[:2])) for one in (version, transformers.__version__))
    return pytest.mark.skipif(found < needed, reason=f"needs transformers {version}")


def described(case: Any) -> str:
    """An id of a case that is the same in every process: without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(case))


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``, of which all after the first ``count`` are slow tests."""
    every = list(cases)
    return every[:count] + [
        pytest.param(*case.values, id=case.id, marks=(*case.marks, pytest.mark.slow))
        if hasattr(case, "marks")
        else pytest.param(case, marks=pytest.mark.slow)
        for case in every[count:]
    ]


def one_in(count: int, cases: Iterable[Any], start: int = 0) -> list[Any]:
    """Cases for ``parametrize``: one in ``count`` by default, from ``start`` on, the others as slow tests."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if place % count == start else pytest.mark.slow,
        )
        for place, case in enumerate(cases)
    ]


def in_turn(cases: Iterable[Any], values: Iterable[Any], among: Container[Any] | None = None) -> list[Any]:
    """Pairs for ``parametrize``: each case with one value by default, with the others as slow tests.

    Args:
        among: the cases that have a turn; None for all.
    """
    every, turn = list(values), 0
    pairs: list[Any] = []
    for case in cases:
        has = among is None or case in among
        for place, value in enumerate(every):
            parts = [one for part in (case, value) for one in (part if isinstance(part, tuple) else [part])]
            quick = has and place == turn % len(every)
            pairs.append(pytest.param(*parts, marks=() if quick else pytest.mark.slow))
        turn += has
    return pairs
