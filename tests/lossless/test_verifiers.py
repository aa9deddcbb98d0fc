"""The matrix's other half: every verifier on the embedded model, in float64."""

from __future__ import annotations

import pytest

from lossless.conftest import Lab
from lossless.test_matrix import FEW, SPECS
from outpace.core import OutpaceError, SamplingParams
from outpace.verify import VERIFIERS, load_verifier

PROMPTS = 3
LENGTH = 40
# Greedy, these give the tokens of plain decoding; typical acceptance is exact there.
EQUAL_IF_GREEDY = ["match", "rejection", "spectr", "block", "traversal", "typical"]
LOSSY = ["typical", "top_beta", "bild", "lenient"]


def test_every_verifier_is_in_the_matrix() -> None:
    assert {*EQUAL_IF_GREEDY, *LOSSY} == VERIFIERS.keys()
    assert [name for name in VERIFIERS if load_verifier(name).lossy] == LOSSY


# rejection with every drafter, the others with chains and trees, chosen and sampled; the rest is slow.
QUICK = {"jacobi", "prompt_lookup", "draft_model", "draft_model, trees", "medusa"}
PAIRS = [
    pytest.param(
        verifier,
        drafter,
        marks=() if verifier == "rejection" or drafter in QUICK else pytest.mark.slow,
    )
    for verifier in EQUAL_IF_GREEDY[1:]
    for drafter in SPECS
]


@pytest.mark.parametrize(("verifier", "drafter"), PAIRS)
def test_greedy_tokens_are_those_of_plain_decoding(exact: Lab, verifier: str, drafter: str) -> None:
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


@pytest.mark.parametrize("verifier", LOSSY)
def test_lossy_verifiers_take_fewer_steps_than_match_and_say_that_they_are(exact: Lab, verifier: str) -> None:
    prompts, params = exact.prompts[:PROMPTS], exact.params("top_p")[:PROMPTS]
    engines = [exact.engine(SPECS["draft_model"], name) for name in ("match", verifier)]
    kept, found = (engine.generate(prompts, params) for engine in engines)
    assert all(g.stats.lossy for g in found) and not any(g.stats.lossy for g in kept)
    tau = [sum(g.stats.tokens for g in some) / sum(g.stats.steps for g in some) for some in (kept, found)]
    assert tau[1] > tau[0]
