"""The matrix's other half: every verifier on the embedded model, in float64."""

from __future__ import annotations

import pytest

from lossless.conftest import Lab
from lossless.test_matrix import FEW, SPECS
from outpace.core import OutpaceError, SamplingParams
from outpace.verify import VERIFIERS
from parts import in_turn

PROMPTS = 3
LENGTH = 40
# Chains and trees, chosen and sampled, each with one verifier in turn; other pairs are slow.
QUICK = {"suffix", "draft_model", "draft_model, trees", "hydra"}
OTHERS = [verifier for verifier in VERIFIERS if verifier != "match"]


@pytest.mark.parametrize(("drafter", "verifier"), in_turn(SPECS, OTHERS, among=QUICK))
def test_greedy_tokens_are_those_of_plain_decoding(exact: Lab, drafter: str, verifier: str) -> None:
    check_greedy(exact, verifier, drafter)


def check_greedy(exact: Lab, verifier: str, drafter: str) -> None:
    """Check that greedy tokens are those of plain decoding, in fewer steps, or that the pair is refused."""
    try:
        engine = exact.engine(SPECS[drafter], verifier)
    except OutpaceError as error:
        refusals = {"block": "verifies chains", "spectr": "takes siblings drawn with replacement"}
        assert refusals[verifier] in str(error)
        return
    params = SamplingParams(max_new_tokens=LENGTH)
    found = engine.generate(exact.prompts[:PROMPTS], params)
    assert [g.tokens for g in found] == [g.tokens[:LENGTH] for g in exact.plain("greedy", FEW)[:PROMPTS]]
    assert sum(g.stats.steps for g in found) < sum(len(g.tokens) for g in found)
