"""The losslessness matrix: every drafter gives the tokens of plain decoding.

`make test` runs every drafter with every sampling on four prompts, in float32 with one sampling each;
`make test-slow` runs all combinations on all 64 prompts.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from devices import DEVICES
from lossless.conftest import SAMPLINGS, Lab, lab_on
from lossless.margin import explain_differences
from outpace.core import Generation
from outpace.drafters import DRAFTERS

# Small trees, so that the matrix is quick. Every registered drafter must be here.
SPECS = {
    "jacobi": "jacobi:num_speculative_tokens=6",
    "lookahead": "lookahead:window=4,ngram=4,guesses=4",
    "prompt_lookup": "prompt_lookup",
    "reference": "reference:num_speculative_tokens=16",
    "suffix": "suffix:num_speculative_tokens=16",
    "retrieval": "retrieval:path={datastore},min_ngram=1,max_nodes=8",
    "token_recycling": "token_recycling:max_nodes=16,top_k=4",
    "combined": "combined:(token_recycling:max_nodes=16)+(prompt_lookup)+(jacobi:num_speculative_tokens=4),"
    "max_nodes=12,row_cost=0",
    "draft_model": "draft_model:num_speculative_tokens=4",
    "draft_model, trees": "draft_model:num_speculative_tokens=3,branching=2x2",
    "cascade": "cascade:draft=(draft_model:num_speculative_tokens=4),inner=(prompt_lookup)",
    "blockwise": "blockwise:path={trained}",
    "medusa": "medusa:max_nodes=8",
    "hydra": "hydra:path={trained},max_nodes=8",
    "eagle": "eagle:num_speculative_tokens=3",
    "eagle, trees": "eagle:num_speculative_tokens=3,expand=3,max_nodes=8",
    "dflash": "dflash:path={trained},num_speculative_tokens=3",
    "spec_drafter": "spec_drafter:path={trained},num_speculative_tokens=3",
    "self_speculative": "self_speculative:skip=2+4,num_speculative_tokens=3",
    "early_exit": "early_exit:layers=4,num_speculative_tokens=3,min_confidence=0.1",
    "early_exit, trained": "early_exit:path={trained},num_speculative_tokens=3,min_confidence=0",
    "early_exit, attention": "early_exit:path={trained attention},num_speculative_tokens=3,min_confidence=0",
    "windowed": "windowed:sinks=2,recent=12,num_speculative_tokens=3",
    "parallel_tokens": "parallel_tokens:path={trained},num_speculative_tokens=2",
    "hydra, by confidence": "hydra:path={trained},expand=3,max_nodes=8",
}
NEAR_TIE = 1e-4
ALL, FEW = 64, 4
SAMPLED = list(SAMPLINGS)
SIZES = [FEW, pytest.param(ALL, marks=pytest.mark.slow)]
# Each drafter with one sampling, in turns; the others are slow.
PAIRS = [
    pytest.param(drafter, sampling, FEW, id=f"{drafter}-{sampling}-{FEW}")
    for drafter, sampling in zip(SPECS, cycle(SAMPLED), strict=False)
] + [
    pytest.param(drafter, sampling, ALL, id=f"{drafter}-{sampling}-{ALL}", marks=pytest.mark.slow)
    for drafter in SPECS
    for sampling in SAMPLED
]


def test_every_drafter_is_in_the_matrix() -> None:
    assert {name.partition(",")[0] for name in SPECS} | {"none"} == DRAFTERS.keys()


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", SPECS)
def test_float64_tokens_are_those_of_plain_decoding(
    exact: Lab, drafter: str, sampling: str, first: int
) -> None:
    plain = exact.plain(sampling, first)
    found = exact.decode(SPECS[drafter], sampling, first)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert [g.finish_reason for g in found] == [g.finish_reason for g in plain]
    assert sum(g.stats.steps for g in found) < sum(g.stats.steps for g in plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drafter", ["lookahead", "suffix", "draft_model, trees", "medusa", "eagle, trees"])
def test_a_sample_of_the_matrix_on_each_device(drafter: str, device: str) -> None:
    """Each prompt has its own sampling; all share a batch, into which they come at different steps."""
    lab, samplings = lab_on(torch.float64, device), list(SAMPLINGS)
    requests = [
        (prompt, replace(lab.params(samplings[place % 3])[place], max_new_tokens=32))
        for place, prompt in enumerate(lab.prompts[:6])
    ]
    plain = [lab.engine("none").generate([prompt], params)[0].tokens for prompt, params in requests]
    engine = lab.engine(SPECS[drafter])
    sequences = []
    for request in requests:
        sequences.append(engine.add(*request))
        engine.step()
    while engine.sequences:
        engine.step()
    assert [sequence.output for sequence in sequences] == plain


@pytest.mark.parametrize(("drafter", "sampling", "first"), PAIRS)
def test_float32_tokens_differ_at_near_ties_only(
    single: Lab, drafter: str, sampling: str, first: int
) -> None:
    plain = single.plain(sampling, first)
    found = single.decode(SPECS[drafter], sampling, first)
    params = single.params(sampling)[:first]
    wrong = explain_differences(single.target, single.prompts[:first], params, plain, found, NEAR_TIE)
    assert not wrong


@pytest.mark.parametrize("first", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", ["none", *SPECS])
def test_tokens_of_a_batch_are_those_of_each_prompt_alone(single: Lab, drafter: str, first: int) -> None:
    prompts = single.prompts[:first]
    params = [replace(own, max_new_tokens=40) for own in single.params("penalty")[:first]]
    engine = single.engine(SPECS.get(drafter, drafter))
    together = engine.generate(prompts, params)
    alone: list[Generation] = []
    for prompt, own in zip(prompts, params, strict=True):
        alone += engine.generate([prompt], own)
    wrong = explain_differences(single.target, prompts, params, alone, together, NEAR_TIE)
    assert not wrong
