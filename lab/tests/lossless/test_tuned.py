"""The matrix's row of Medusa-2: the tokens of plain decoding of the tuned target."""

from __future__ import annotations

import pytest

from lossless.conftest import Lab
from outpace.testing.matrix import SAMPLINGS
from parts import first
from taught import tuned

FEW = 4
"""Prompts, to save time."""


def heads() -> str:
    return f"medusa:path={tuned()},max_nodes=12"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_float64_tokens_are_those_of_the_tuned_target(tuned_exact: Lab, sampling: str) -> None:
    tuned_exact.check_equal(heads(), sampling, FEW)


@pytest.mark.parametrize("sampling", first(1, SAMPLINGS))
def test_float32_tokens_differ_at_near_ties_only(tuned_single: Lab, sampling: str) -> None:
    tuned_single.check_near(heads(), sampling, FEW)


def test_the_tuned_target_is_another(tuned_exact: Lab, exact: Lab) -> None:
    before, after = (lab.decode("none", "greedy", 4) for lab in (exact, tuned_exact))
    assert [g.tokens for g in before] != [g.tokens for g in after]
