"""The matrix's row of Medusa-2: the tokens of plain decoding of the tuned target."""

from __future__ import annotations

import pytest

from lossless.conftest import SAMPLINGS, Lab
from lossless.margin import explain_differences
from lossless.test_matrix import NEAR_TIE
from lossless.trained import tuned

FEW = 4
"""Prompts, to save time."""


def heads() -> str:
    return f"medusa:path={tuned()},max_nodes=12"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_float64_tokens_are_those_of_the_tuned_target(tuned_exact: Lab, sampling: str) -> None:
    plain, found = (tuned_exact.decode(drafter, sampling, FEW) for drafter in ("none", heads()))
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert [g.finish_reason for g in found] == [g.finish_reason for g in plain]
    assert sum(g.stats.steps for g in found) < sum(g.stats.steps for g in plain)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_float32_tokens_differ_at_near_ties_only(tuned_single: Lab, sampling: str) -> None:
    plain, found = (tuned_single.decode(drafter, sampling, FEW) for drafter in ("none", heads()))
    prompts, params = tuned_single.prompts[:FEW], tuned_single.params(sampling)[:FEW]
    assert not explain_differences(tuned_single.target, prompts, params, plain, found, NEAR_TIE)


def test_the_tuned_target_is_another(tuned_exact: Lab, exact: Lab) -> None:
    before, after = (lab.decode("none", "greedy", 4) for lab in (exact, tuned_exact))
    assert [g.tokens for g in before] != [g.tokens for g in after]
