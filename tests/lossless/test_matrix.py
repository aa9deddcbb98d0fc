"""The losslessness matrix: every drafter gives the tokens of plain decoding.

`make test` runs every drafter with all samplings in one batch, and some in float32 with one sampling each;
`make test-slow` runs all combinations on all 64 prompts.
"""

from __future__ import annotations

import pytest
import torch

from devices import DEVICES
from lossless.conftest import Lab, lab_on
from outpace.drafters import DRAFTERS
from outpace.testing.matrix import SAMPLINGS, pairs

# Small trees, so that the matrix is quick. A drafter that is not here runs with its defaults.
_SMALL = {
    "jacobi": "jacobi:num_speculative_tokens=6",
    "lookahead": "lookahead:window=4,ngram=4,guesses=4",
    "prompt_lookup": "prompt_lookup",
    "reference": "reference:num_speculative_tokens=16",
    "suffix": "suffix:num_speculative_tokens=16",
    "combined": "combined:(lookahead:window=3,ngram=3)+(prompt_lookup)+(jacobi:num_speculative_tokens=4),"
    "max_nodes=12,row_cost=0",
    "either": "either:(suffix:num_speculative_tokens=16)+(self:num_speculative_tokens=3)",
    "self": "self:num_speculative_tokens=4",
    "draft_model": "draft_model:num_speculative_tokens=4",
    "draft_model, trees": "draft_model:num_speculative_tokens=3,branching=2x2",
    "medusa": "medusa:max_nodes=8",
    "hydra": "hydra:path={trained},max_nodes=8",
    "eagle": "eagle:num_speculative_tokens=3",
    "eagle, trees": "eagle:num_speculative_tokens=3,expand=3,max_nodes=8",
    "dflash": "dflash:path={trained},num_speculative_tokens=3,max_nodes=0",
    "dflash, trees": "dflash:path={trained},max_nodes=8",
    "mtp": "mtp:path={trained},num_speculative_tokens=3",
    "mtp, trees": "mtp:path={trained},num_speculative_tokens=3,expand=3,max_nodes=8",
    "mtp, a part": "mtp:path={trained},num_speculative_tokens=3,draft_vocabulary=1024",
    "hydra, by confidence": "hydra:path={trained},expand=3,max_nodes=8",
}
# Assistants attend to the keys of a Gemma 4, and P-EAGLEs are published: tests/unit has them.
_NAMED = {name.partition(",")[0] for name in _SMALL} | {"none", "assistant", "peagle"}
SPECS = _SMALL | {name: name for name in DRAFTERS if name not in _NAMED}
ALL, FEW = 64, 4
# Chains, trees, readers of states and users of the target's cache; others are slow in float32.
_QUICK = {"lookahead", "suffix", "draft_model, trees", "hydra", "mtp"}
# Each drafter with one sampling, in turns; the others are slow.
PAIRS = [
    *(
        pytest.param(
            drafter,
            sampling,
            FEW,
            id=f"{drafter}-{sampling}-{FEW}",
            marks=() if drafter in _QUICK else pytest.mark.slow,
        )
        for drafter, sampling in pairs(list(SPECS))
    ),
    *(
        pytest.param(drafter, sampling, ALL, id=f"{drafter}-{sampling}-{ALL}", marks=pytest.mark.slow)
        for drafter in SPECS
        for sampling in SAMPLINGS
    ),
]


def test_the_matrix_names_drafters_of_outpace() -> None:
    assert DRAFTERS.keys() >= _NAMED


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drafter", SPECS)
def test_all_samplings_in_a_batch_that_sequences_join(drafter: str, device: str) -> None:
    if "self" in SPECS[drafter] and device != "cpu":
        pytest.skip("weights are rounded for drafts on a CPU")
    lab_on(torch.float64, device).check_joining(SPECS[drafter])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", SPECS)
def test_float64_tokens_are_those_of_plain_decoding(exact: Lab, drafter: str, sampling: str) -> None:
    exact.check_equal(SPECS[drafter], sampling, ALL)


@pytest.mark.parametrize(("drafter", "sampling", "first"), PAIRS)
def test_float32_tokens_differ_at_near_ties_only(
    single: Lab, drafter: str, sampling: str, first: int
) -> None:
    single.check_near(SPECS[drafter], sampling, first)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", *SPECS])
def test_tokens_of_a_batch_are_those_of_each_prompt_alone(single: Lab, drafter: str) -> None:
    single.check_batch(SPECS.get(drafter, drafter), 16)
