"""The losslessness matrix: every drafter says what plain decoding says, token for token."""

from __future__ import annotations

import pytest

from lossless.conftest import SAMPLINGS, Lab
from lossless.margin import explain_differences
from outpace.core import Generation
from outpace.drafters import DRAFTERS

# Small trees, so that the matrix is quick; each drafter that is registered must be here.
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
    "parallel_tokens": "parallel_tokens:path={trained},num_speculative_tokens=2",
}
NEAR_TIE = 1e-4
LEARNED = {name for name, spec in SPECS.items() if "{trained" in spec} | {"medusa", "eagle", "eagle, trees"}
VARIANT = {"early_exit, attention"}
FEW = 16
"""Prompts on which the learned drafters meet float32, to save time, and a variant of one both. In float64 the
others meet all."""


def test_every_drafter_is_in_the_matrix() -> None:
    assert {name.partition(",")[0] for name in SPECS} | {"none"} == DRAFTERS.keys()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", SPECS)
def test_float64_tokens_are_those_of_plain_decoding(exact: Lab, drafter: str, sampling: str) -> None:
    first = FEW if drafter in VARIANT else None
    plain = exact.plain(sampling)[:first]
    found = exact.decode(SPECS[drafter], sampling, first)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert [g.finish_reason for g in found] == [g.finish_reason for g in plain]
    assert sum(g.stats.steps for g in found) < sum(g.stats.steps for g in plain)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", SPECS)
def test_float32_tokens_differ_at_near_ties_only(single: Lab, drafter: str, sampling: str) -> None:
    first = FEW if drafter in LEARNED else None
    plain = single.plain(sampling)[:first]
    found = single.decode(SPECS[drafter], sampling, first)
    params = single.params(sampling)[:first]
    wrong = explain_differences(single.target, single.prompts[:first], params, plain, found, NEAR_TIE)
    assert not wrong


@pytest.mark.parametrize("drafter", ["none", *SPECS])
def test_eight_prompts_together_say_what_each_says_alone(single: Lab, drafter: str) -> None:
    spec = SPECS.get(drafter, drafter)
    prompts = single.prompts[::8]
    params = single.params("penalty")[::8]
    together = single.engine(spec).generate(prompts, params)
    alone: list[Generation] = []
    for prompt, own in zip(prompts, params, strict=True):
        alone += single.engine(spec).generate([prompt], own)
    wrong = explain_differences(single.target, prompts, params, alone, together, NEAR_TIE)
    assert not wrong
