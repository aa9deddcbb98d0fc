"""The laboratory's verifiers on the embedded model, in float64."""

from __future__ import annotations

import pytest

from lossless.conftest import Lab
from lossless.test_matrix import SPECS
from lossless.test_verifiers import PROMPTS, QUICK, check_greedy
from parts import first

LOSSY = ["typical", "top_beta", "bild", "lenient"]
# Greedy, these give the tokens of plain decoding; typical acceptance is exact there.
PAIRS = [
    pytest.param(verifier, drafter, marks=() if drafter in QUICK else pytest.mark.slow)
    for verifier in ("block", "spectr", "traversal", "typical")
    for drafter in SPECS
]


@pytest.mark.parametrize(("verifier", "drafter"), PAIRS)
def test_greedy_tokens_are_those_of_plain_decoding(exact: Lab, verifier: str, drafter: str) -> None:
    check_greedy(exact, verifier, drafter)


@pytest.mark.parametrize("verifier", first(2, LOSSY))
def test_lossy_verifiers_take_fewer_steps_than_match_and_say_that_they_are(exact: Lab, verifier: str) -> None:
    prompts, params = exact.prompts[:PROMPTS], exact.params("top_p")[:PROMPTS]
    engines = [exact.engine(SPECS["draft_model"], name) for name in ("match", verifier)]
    kept, found = (engine.generate(prompts, params) for engine in engines)
    assert all(g.stats.lossy for g in found) and not any(g.stats.lossy for g in kept)
    tau = [sum(g.stats.tokens for g in some) / sum(g.stats.steps for g in some) for some in (kept, found)]
    assert tau[1] > tau[0]
