"""Verifiers are exact: their output distribution, enumerated, is the target's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from enumeration import (
    Enumerated,
    Model,
    Script,
    Text,
    difference,
    output_distribution,
    plain_distribution,
)
from outpace.core import Draft, OutpaceError, Verdict
from outpace.sampling import Logits
from outpace.tree import chain
from outpace.verify import load_verifier, match, rejection

VOCABULARY = 4
DEPTH = 3
EXACT = 1e-12


def table(seed: int, zeros: float = 0.0) -> Model:
    """A model with a random distribution after each text; ``zeros`` of its probabilities are 0."""
    rows: dict[Text, Tensor] = {}

    def model(text: Text) -> Tensor:
        if text not in rows:
            generator = torch.Generator().manual_seed(hash((seed, text)) % 2**31)
            weights = torch.rand(VOCABULARY, generator=generator, dtype=torch.float64) ** 3
            weights[torch.rand(VOCABULARY, generator=generator) < zeros] = 0
            if weights.sum() == 0:
                weights[seed % VOCABULARY] = 1
            rows[text] = weights / weights.sum()
        return rows[text]

    return model


def sampled_chain(draft_model: Model, depth: int = DEPTH) -> Callable[[Script], Draft]:
    """Drafts a chain by sampling from a model."""

    def draft(script: Script) -> Draft:
        text: Text = ()
        rows: dict[int, Tensor] = {}
        for place in range(depth):
            rows[place - 1] = draft_model(text)
            text = (*text, script.draw(rows[place - 1].tolist()))
        return Draft(text, tuple(range(-1, depth - 1)), rows)

    return draft


def fixed(draft: Draft) -> Callable[[Script], Draft]:
    return lambda script: draft


@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(8))
def test_rejection_is_exact(seed: int, zeros: float, eos: int | None) -> None:
    target, draft_model = table(seed, zeros), table(seed + 100, zeros)
    found = output_distribution(rejection, target, sampled_chain(draft_model), DEPTH + 1, eos)
    assert difference(found, plain_distribution(target, DEPTH + 1, eos)) < EXACT


@pytest.mark.parametrize("tokens", [[], [0], [3, 1, 2], [2, 2, 2]])
@pytest.mark.parametrize("seed", range(4))
def test_rejection_is_exact_for_a_drafter_that_chooses(seed: int, tokens: list[int]) -> None:
    target = table(seed, zeros=0.3)
    found = output_distribution(rejection, target, fixed(chain(tokens)), DEPTH + 1)
    assert difference(found, plain_distribution(target, DEPTH + 1)) < EXACT


def test_rejection_accepts_every_draft_of_the_target_itself() -> None:
    target = table(1)

    def verify(logits: Logits, draft: Draft, draw: Enumerated) -> Verdict:
        verdict = rejection(logits, draft, draw)
        assert len(verdict.path) == DEPTH
        return verdict

    found = output_distribution(verify, target, sampled_chain(target), DEPTH + 1)
    assert difference(found, plain_distribution(target, DEPTH + 1)) < EXACT


def test_rejection_never_accepts_what_the_target_excludes() -> None:
    """A drafter that is certain and wrong."""
    certain = lambda text: torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)  # noqa: E731
    target = lambda text: torch.tensor([0, 0.5, 0.5, 0], dtype=torch.float64)  # noqa: E731
    found = output_distribution(rejection, target, sampled_chain(certain), DEPTH + 1)
    assert difference(found, plain_distribution(target, DEPTH + 1)) < EXACT


def _without_residual(logits: Logits, draft: Draft, draw: Enumerated) -> Verdict:
    """Speculative sampling with the classic mistake: a rejected token is redrawn from q, not from q - p."""

    class Blunt:
        def choose(self, distribution: Tensor, node: int) -> int:
            return draw.choose(draw.distribution(logits, node), node)

        def __getattr__(self, name: str) -> object:
            return getattr(draw, name)

    return rejection(logits, draft, Blunt())  # type: ignore[arg-type]


def _always_accepting(logits: Logits, draft: Draft, draw: Enumerated) -> Verdict:
    draw.accept = lambda probability, node: True  # type: ignore[method-assign]
    return rejection(logits, draft, draw)


@pytest.mark.parametrize("broken", [_without_residual, _always_accepting])
def test_the_enumeration_sees_a_broken_rejection(
    broken: Callable[[Logits, Draft, Enumerated], Verdict],
) -> None:
    target = table(0)
    found = output_distribution(broken, target, sampled_chain(table(100)), DEPTH + 1)
    assert difference(found, plain_distribution(target, DEPTH + 1)) > 1e-3


def test_rejection_refuses_trees_and_impossible_drafts() -> None:
    script = Script([])
    tree = Draft([1, 2], [-1, -1])
    with pytest.raises(OutpaceError, match="chains"):
        rejection(Logits(torch.empty(3, 0)), tree, Enumerated(script, table(0), tree))
    impossible = Draft([1], [-1], {-1: torch.tensor([1.0, 0, 0, 0])})
    with pytest.raises(OutpaceError, match="probability 0"):
        rejection(Logits(torch.empty(2, 0)), impossible, Enumerated(script, table(0), impossible))


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Trees with duplicate siblings."""
    size = draw(st.integers(0, 7))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return Draft([draw(st.integers(0, VOCABULARY - 1)) for _ in range(size)], parents)


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 50), st.sampled_from([None, 1]))
def test_match_is_exact_on_trees(draft: Draft, seed: int, eos: int | None) -> None:
    target = table(seed, zeros=0.3)
    found = output_distribution(match, target, fixed(draft), DEPTH + 1, eos)
    assert difference(found, plain_distribution(target, DEPTH + 1, eos)) < EXACT


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 50))
def test_match_accepts_all_that_the_tree_holds(draft: Draft, seed: int) -> None:
    """The accepted path is the longest beginning of the target's text that is a path of the tree."""

    def verify(logits: Logits, tree: Draft, draw: Enumerated) -> Verdict:
        verdict = match(logits, tree, draw)
        nodes = {-1}
        for place, token in enumerate(verdict.tokens):
            nodes = {n for n, p in enumerate(tree.parents) if p in nodes and tree.tokens[n] == token}
            assert bool(nodes) == (place < len(verdict.path))
        return verdict

    output_distribution(verify, table(seed), fixed(draft), 1)


def test_match_switches_between_equal_siblings() -> None:
    """Two branches begin alike; only the second goes on as the target does."""
    draft = Draft([1, 1, 2, 3], [-1, -1, 0, 1])
    sure = {(): 1, (1,): 3, (1, 3): 0}
    target = lambda text: torch.eye(4, dtype=torch.float64)[sure[text]]  # noqa: E731
    script = Script([])
    verdict = match(Logits(torch.empty(5, 0)), draft, Enumerated(script, target, draft))
    assert (verdict.path, verdict.tokens) == ([1, 3], [1, 3, 0])


def test_verifiers_are_found_by_name() -> None:
    assert load_verifier("match").verify is match
    with pytest.raises(OutpaceError, match="unknown verifier 'mach'; there are: match, rejection"):
        load_verifier("mach")
