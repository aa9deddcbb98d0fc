"""SpecTr is exact: its output distribution, enumerated, is the target's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace_lab.verify.spectr import SpecTr
from unit.verify.test_exact import (
    check_certain_and_wrong,
    check_chosen,
    check_sampled,
    ends,
    seeds,
    vocabularies,
)


@settings(max_examples=25)
@given(data=st.data(), vocabulary=vocabularies, seed=seeds, zeros=st.sampled_from([0.0, 0.4]), eos=ends)
def test_sampled_drafts(
    data: st.DataObject, vocabulary: int, seed: int, zeros: float, eos: int | None
) -> None:
    check_sampled(SpecTr(), data, vocabulary, seed, zeros, eos)


@settings(max_examples=40)
@given(data=st.data(), vocabulary=vocabularies, seed=seeds, eos=ends)
def test_drafts_of_chosen_tokens(data: st.DataObject, vocabulary: int, seed: int, eos: int | None) -> None:
    check_chosen(SpecTr(), data, vocabulary, seed, eos)


@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, -1, 0, 1]])
def test_a_drafter_that_is_certain_and_wrong(parents: list[int]) -> None:
    check_certain_and_wrong(SpecTr(), parents, replacement=True)
