"""The draws that the engine gives the laboratory's verifiers: the tests of ``unit/verify/test_draws.py``."""

from __future__ import annotations

import pytest

from outpace.core import SamplingParams
from outpace.verify import load_verifier
from unit.verify import test_draws as own

VERIFIERS = ["bild", "block", "lenient", "spectr", "top_beta", "traversal", "typical"]


@pytest.mark.parametrize("verifier", ["block", "spectr", "traversal", "typical"])
@pytest.mark.parametrize("drafter", [*own.CHOOSING, "draft_model", "token_recycling"])
def test_greedy_tokens_are_those_of_plain_decoding(drafter: str, verifier: str) -> None:
    own.test_greedy_tokens_are_those_of_plain_decoding(drafter, verifier)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_stats_say_whether_the_verifier_is_lossy(verifier: str) -> None:
    own.test_stats_say_whether_the_verifier_is_lossy(verifier)


@pytest.mark.parametrize("params", [own.GREEDY, own.SAMPLED])
@pytest.mark.parametrize("verifier", [name for name in VERIFIERS if not load_verifier(name).ahead])
def test_a_processor_sees_each_true_prefix_once(verifier: str, params: SamplingParams) -> None:
    own.test_a_processor_sees_each_true_prefix_once(verifier, params)
