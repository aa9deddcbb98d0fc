"""SpecTr, block and traversal verification are exact: what they emit, enumerated, is the distribution."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.verify import Verifier, load_verifier
from unit.verify.test_exact import (
    check_certain_and_wrong,
    check_chosen,
    check_sampled,
    ends,
    seeds,
    vocabularies,
)

LOSSLESS = [load_verifier(name) for name in ("spectr", "block", "traversal")]
each = pytest.mark.parametrize("verifier", LOSSLESS, ids=str)


@each
@settings(max_examples=25)
@given(data=st.data(), vocabulary=vocabularies, seed=seeds, zeros=st.sampled_from([0.0, 0.4]), eos=ends)
def test_sampled_drafts(
    verifier: Verifier, data: st.DataObject, vocabulary: int, seed: int, zeros: float, eos: int | None
) -> None:
    check_sampled(verifier, data, vocabulary, seed, zeros, eos)


@each
@settings(max_examples=40)
@given(data=st.data(), vocabulary=vocabularies, seed=seeds, eos=ends)
def test_drafts_of_chosen_tokens(
    verifier: Verifier, data: st.DataObject, vocabulary: int, seed: int, eos: int | None
) -> None:
    check_chosen(verifier, data, vocabulary, seed, eos)


@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, -1, 0, 1]])
def test_a_drafter_that_is_certain_and_wrong(parents: list[int]) -> None:
    check_certain_and_wrong(load_verifier("spectr"), parents, replacement=True)
