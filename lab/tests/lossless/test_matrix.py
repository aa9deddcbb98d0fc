"""The losslessness matrix of the laboratory's drafters; see ``outpace.testing.matrix``.

`make test-lab` runs every drafter with all samplings in one batch, in float32 with one sampling each;
`make test-slow` runs all combinations on all 64 prompts.
"""

from __future__ import annotations

import pytest

from lossless.conftest import Lab
from outpace.plugins import installed
from outpace.testing.matrix import SAMPLINGS, pairs
from stored import with_datastore
from taught import with_trained

# Small trees, so that the matrix is quick. Every drafter of the laboratory must be here.
SPECS = {
    "retrieval": "retrieval:path={datastore},min_ngram=1,max_nodes=8",
    "token_recycling": "token_recycling:max_nodes=16,top_k=4",
    "cascade": "cascade:draft=(draft_model:num_speculative_tokens=4),inner=(prompt_lookup)",
    "blockwise": "blockwise:path={trained}",
    "spec_drafter": "spec_drafter:path={trained},num_speculative_tokens=3",
    "self_speculative": "self_speculative:skip=2+4,num_speculative_tokens=3",
    "early_exit": "early_exit:layers=4,num_speculative_tokens=3,min_confidence=0.1",
    "early_exit, trained": "early_exit:path={trained},num_speculative_tokens=3,min_confidence=0",
    "early_exit, attention": "early_exit:path={trained attention},num_speculative_tokens=3,min_confidence=0",
    "windowed": "windowed:sinks=2,recent=12,num_speculative_tokens=3",
    "parallel_tokens": "parallel_tokens:path={trained},num_speculative_tokens=2",
}
ALL, FEW = 64, 4
# Each drafter with one sampling, in turns; the others are slow.
PAIRS = [
    *(pytest.param(*pair, FEW, id="-".join([*pair, str(FEW)])) for pair in pairs(list(SPECS))),
    *(
        pytest.param(drafter, sampling, ALL, id=f"{drafter}-{sampling}-{ALL}", marks=pytest.mark.slow)
        for drafter in SPECS
        for sampling in SAMPLINGS
    ),
]


def ready(drafter: str) -> str:
    return with_trained(with_datastore(SPECS[drafter]))


def test_every_drafter_is_in_the_matrix() -> None:
    own = {name for name, entry in installed("drafters").items() if entry.value.startswith("outpace_lab.")}
    assert {name.partition(",")[0] for name in SPECS} == own


@pytest.mark.parametrize("drafter", SPECS)
def test_all_samplings_in_a_batch_that_sequences_join(exact: Lab, drafter: str) -> None:
    exact.check_joining(ready(drafter))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", SPECS)
def test_float64_tokens_are_those_of_plain_decoding(exact: Lab, drafter: str, sampling: str) -> None:
    exact.check_equal(ready(drafter), sampling, ALL)


@pytest.mark.parametrize(("drafter", "sampling", "first"), PAIRS)
def test_float32_tokens_differ_at_near_ties_only(
    single: Lab, drafter: str, sampling: str, first: int
) -> None:
    single.check_near(ready(drafter), sampling, first)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", SPECS)
def test_tokens_of_a_batch_are_those_of_each_prompt_alone(single: Lab, drafter: str) -> None:
    single.check_batch(ready(drafter), 16)
