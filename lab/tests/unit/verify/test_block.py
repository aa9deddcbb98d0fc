"""Block verification is exact, and its expected length is never below that of token-by-token rejection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafts import always, chain_shape, sampled, table
from enumeration import EXACT, Enumerated, Model, Script, Text, error, expected_length
from outpace.core import Draft, OutpaceError
from outpace.draws.logits import Logits
from outpace.verify.rejection import rejection
from outpace_lab.verify.block import block


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_may_end_where_its_tokens_say(seed: int) -> None:
    """A drafter stops after a token it is unsure of, or that would end the text."""
    target, draft_model = table(seed), table(seed + 100)

    def drafts(script: Script) -> Draft:
        tokens: list[int] = []
        rows: dict[int, Tensor] = {}
        while len(tokens) < 3 and (not tokens or tokens[-1] != 2):
            rows[len(tokens) - 1] = draft_model(tuple(tokens))
            tokens.append(script.draw(rows[len(tokens) - 1].tolist()))
        return Draft(tokens, chain_shape(len(tokens)), rows)

    assert error(block, target, drafts, 4) < EXACT


# -- expected length -------------------------------------------------------------------------------------


def _by_formula(target: Model, draft_model: Model, length: int) -> tuple[float, float]:
    """Expected lengths by rejection and by block verification, as sums over the drafts' beginnings.

    By rejection a beginning stands with the product of min(1, q / p) over its tokens, by block verification
    with its share: the product, cut to 1 at each token.
    """
    one = block_wise = 0.0
    begun: dict[Text, tuple[float, float, float]] = {(): (1.0, 1.0, 1.0)}
    for _ in range(length):
        longer: dict[Text, tuple[float, float, float]] = {}
        for text, (drawn, product, share) in begun.items():
            for token, (q, p) in enumerate(
                zip(target(text).tolist(), draft_model(text).tolist(), strict=True)
            ):
                if p > 0:
                    here = (drawn * p, product * min(1.0, q / p), min(1.0, share * q / p))
                    longer[(*text, token)] = here
                    one += here[0] * here[1]
                    block_wise += here[0] * here[2]
        begun = longer
    return one, block_wise


@settings(max_examples=40)
@given(
    st.data(), st.sampled_from([4, 5, 6]), st.integers(0, 200), st.sampled_from([0.0, 0.4]), st.integers(0, 3)
)
def test_the_expected_length_is_never_below_that_of_rejection(
    data: st.DataObject, vocabulary: int, seed: int, zeros: float, nearness: int
) -> None:
    """Both expectations by enumeration, and both by formula."""
    length = data.draw(st.integers(1, 3 if vocabulary == 4 else 2))
    target, other = table(seed, zeros, vocabulary), table(seed + 1000, zeros, vocabulary)
    # A draft model that is nearer to the target has longer chains accepted.
    draft_model = lambda text: (nearness * target(text) + other(text)) / (nearness + 1)  # noqa: E731
    drafts = sampled(draft_model, chain_shape(length))
    by_token = expected_length(rejection, target, drafts)
    by_block = expected_length(block, target, drafts)
    assert by_block > by_token - EXACT
    assert (by_token, by_block) == pytest.approx(_by_formula(target, draft_model, length), abs=EXACT)
    if length == 1:
        assert by_block == pytest.approx(by_token, abs=EXACT)


def test_the_papers_example() -> None:
    """Section 2: two tokens, q = (1/3, 2/3), p = (2/3, 1/3), two drafted: 11/9 tokens instead of 10/9."""
    target, drafts = always(1 / 3, 2 / 3), sampled(always(2 / 3, 1 / 3), chain_shape(2))
    assert expected_length(rejection, target, drafts) == pytest.approx(10 / 9, abs=EXACT)
    assert expected_length(block, target, drafts) == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_longer_where_the_models_differ(seed: int) -> None:
    target, drafts = table(seed), sampled(table(seed + 100), chain_shape(3))
    gain = expected_length(block, target, drafts) - expected_length(rejection, target, drafts)
    assert gain > 1e-3


# -- what is refused -------------------------------------------------------------------------------------


def test_trees_are_refused() -> None:
    draft = Draft([1, 2], [-1, -1])
    draw = Enumerated(Script([]), always(1, 0, 0, 0), draft)
    with pytest.raises(OutpaceError, match="verifies chains; use verifier='match', 'rejection'"):
        block(Logits(torch.empty(3, 0)), draft, draw)
