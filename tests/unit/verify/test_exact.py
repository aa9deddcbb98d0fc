"""Every lossless verifier is exact: its output distribution, enumerated, is the target's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts import always, chain_shape, fixed, height, sampled, shapes, table
from enumeration import EXACT, Enumerated, Script, error, expected_length
from outpace.core import Draft, OutpaceError
from outpace.draws.logits import Logits
from outpace.verify import VERIFIERS, Verifier

LOSSLESS = [cls() for cls in VERIFIERS.values() if not cls.lossy]
# Those that use the draft's distributions.
SAMPLERS = [verifier for verifier in LOSSLESS if not verifier.by_tokens]
# Vocabulary -> nodes of a sampled tree, so that there are not too many drafts.
SIZES = {3: 5, 4: 4, 5: 3, 6: 3}

each = pytest.mark.parametrize("verifier", LOSSLESS, ids=str)
each_sampler = pytest.mark.parametrize("verifier", SAMPLERS, ids=str)
vocabularies = st.sampled_from(sorted(SIZES))
seeds = st.integers(0, 50)
ends = st.sampled_from([None, 1])


def _shape(data: st.DataObject, verifier: Verifier, size: int) -> list[int]:
    """Draw the parents of at most `size` nodes, in a shape that the verifier supports."""
    return data.draw(st.builds(chain_shape, st.integers(0, size)) if verifier.chains else shapes(size))


@each
@settings(max_examples=25)
@given(data=st.data(), vocabulary=vocabularies, seed=seeds, zeros=st.sampled_from([0.0, 0.4]), eos=ends)
def test_sampled_drafts(
    verifier: Verifier, data: st.DataObject, vocabulary: int, seed: int, zeros: float, eos: int | None
) -> None:
    check_sampled(verifier, data, vocabulary, seed, zeros, eos)


def check_sampled(
    verifier: Verifier, data: st.DataObject, vocabulary: int, seed: int, zeros: float, eos: int | None
) -> None:
    """Check drafts from a model; those drawn with replacement may have equal siblings."""
    parents = _shape(data, verifier, SIZES[vocabulary])
    replacement = verifier.independent or data.draw(st.booleans())
    target, draft_model = table(seed, zeros, vocabulary), table(seed + 100, zeros, vocabulary)
    drafts = sampled(draft_model, parents, replacement)
    assert error(verifier.verify, target, drafts, height(parents) + 1, eos) < EXACT


@each
@settings(max_examples=40)
@given(data=st.data(), vocabulary=vocabularies, seed=seeds, eos=ends)
def test_drafts_of_chosen_tokens(
    verifier: Verifier, data: st.DataObject, vocabulary: int, seed: int, eos: int | None
) -> None:
    check_chosen(verifier, data, vocabulary, seed, eos)


def check_chosen(
    verifier: Verifier, data: st.DataObject, vocabulary: int, seed: int, eos: int | None
) -> None:
    """Check point masses, several of them under a node, equal siblings included."""
    parents = _shape(data, verifier, 7)
    draft = Draft([data.draw(st.integers(0, vocabulary - 1)) for _ in parents], parents)
    assert error(verifier.verify, table(seed, 0.3, vocabulary), fixed(draft), 4, eos) < EXACT


@each_sampler
@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, -1, 0, 1]])
@pytest.mark.parametrize("replacement", [True, False])
def test_a_drafter_that_is_certain_and_wrong(
    verifier: Verifier, parents: list[int], replacement: bool
) -> None:
    check_certain_and_wrong(verifier, parents, replacement)


def check_certain_and_wrong(verifier: Verifier, parents: list[int], replacement: bool) -> None:
    """Check a drafter whose second candidate does not exist without replacement."""
    if verifier.chains:
        parents = chain_shape(len(parents))
    drafts = sampled(always(1, 0, 0, 0), parents, replacement or verifier.independent)
    target = always(0, 0.5, 0.5, 0)
    assert error(verifier.verify, target, drafts, 4) < EXACT
    assert expected_length(verifier.verify, target, drafts) == 0


@each_sampler
def test_a_drafter_that_is_the_target_is_always_accepted(verifier: Verifier) -> None:
    target = table(1)
    drafts = sampled(target, chain_shape(3))
    assert expected_length(verifier.verify, target, drafts) == pytest.approx(3, abs=EXACT)


@each_sampler
@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([1], [-1], {-1: torch.tensor([1.0, 0, 0, 0])}), "drafted token 1 but gives it probability 0"),
        (Draft([1], [-1], {-1: torch.tensor([torch.nan] * 4)}), "gives it probability nan"),
        (Draft([0, 1], [-1, 0], {-1: torch.tensor([1.0, 0, 0, 0])}), "no distribution for the children of"),
    ],
)
def test_impossible_drafts_are_errors(verifier: Verifier, draft: Draft, message: str) -> None:
    draw = Enumerated(Script([]), always(1, 0, 0, 0), draft)
    with pytest.raises(OutpaceError, match=message):
        verifier.verify(Logits(torch.empty(len(draft) + 1, 0)), draft, draw)
