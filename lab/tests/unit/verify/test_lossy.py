"""Lossy verifiers: the rules of the papers, and the output distribution that follows from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafts import always, fixed, sampled, table, trees
from enumeration import (
    EXACT,
    Model,
    Text,
    difference,
    error,
    expected_length,
    output_distribution,
    plain_distribution,
)
from outpace.core import Draft, SamplingParams
from outpace.draws.logits import Logits
from outpace.draws.noise import Key
from outpace.sequence import KeyedDraw, Sequence
from outpace.tree import chain
from outpace.verify import Verifier
from outpace.verify.match import match
from outpace.verify.rejection import rejection
from outpace_lab.verify.lossy import BiLD, Lenient, TopBeta, Typical, bild, top_beta, typical

NO = -math.inf
# Each verifier beside its rule in plain numbers: may this token stand in this distribution?
Rule = Callable[[list[float], int], bool]


def _typical(epsilon: float, delta: float) -> Rule:
    def rule(q: list[float], token: int) -> bool:
        entropy = -sum(x * math.log(x) for x in q if x > 0)
        return q[token] > min(epsilon, delta * math.exp(-entropy))

    return rule


def _top_beta(beta: int, tau: float) -> Rule:
    def rule(q: list[float], token: int) -> bool:
        better = sum(x > q[token] for x in q)
        return q[token] > 0 and better < beta and math.log(max(q)) - math.log(q[token]) <= tau

    return rule


def _bild(threshold: float) -> Rule:
    return lambda q, token: q[token] > 0 and -math.log(q[token]) <= threshold


RULES: list[tuple[Verifier, Rule]] = [
    (Typical(), _typical(0.09, 0.3)),
    (Typical(epsilon=0.2, delta=2.0), _typical(0.2, 2.0)),
    (TopBeta(), _top_beta(3, 1.0)),
    (TopBeta(beta=2, tau=5.0), _top_beta(2, 5.0)),
    (BiLD(), _bild(2.0)),
    (BiLD(threshold=1.2), _bild(1.2)),
]


def _expected(rule: Rule, target: Model, draft: Draft, length: int) -> dict[Text, float]:
    """The output distribution, straight from the definition."""
    begun: dict[Text, float] = defaultdict(float)

    def go(text: Text, nodes: set[int], weight: float) -> None:
        q = target(text).tolist()
        guesses = {draft.tokens[n] for n, parent in enumerate(draft.parents) if parent in nodes}
        allowed = [token for token in guesses if rule(q, token)]
        for token, probability in enumerate(q):
            if probability > 0:
                said = token if token in guesses or not allowed else max(allowed, key=lambda x: q[x])
                if said in guesses:
                    below = {n for n, p in enumerate(draft.parents) if p in nodes and draft.tokens[n] == said}
                    go((*text, said), below, weight * probability)
                else:
                    begun[(*text, said)] += weight * probability

    go((), {-1}, 1.0)
    return plain_distribution(target, length, None, begun)


@pytest.mark.parametrize(("verifier", "rule"), RULES, ids=lambda value: str(value)[:30])
@settings(max_examples=30)
@given(data=st.data(), vocabulary=st.sampled_from([4, 5, 6]), seed=st.integers(0, 50))
def test_the_output_follows_the_rule(
    verifier: Verifier, rule: Rule, data: st.DataObject, vocabulary: int, seed: int
) -> None:
    draft = data.draw(trees(vocabulary))
    target = table(seed, 0.3, vocabulary)
    found = output_distribution(verifier.verify, target, fixed(draft), 4)
    assert difference(found, _expected(rule, target, draft, 4)) < EXACT


@pytest.mark.parametrize("verifier", [verifier for verifier, _ in RULES], ids=str)
def test_more_is_accepted_than_by_match_and_the_output_moves(verifier: Verifier) -> None:
    target, draft = always(0.4, 0.35, 0.25, 0), fixed(chain([1, 1, 1]))
    assert expected_length(verifier.verify, target, draft) > expected_length(match, target, draft)
    assert error(verifier.verify, target, draft, 4) > 0.01


@pytest.mark.parametrize("verifier", [Typical(1.0, 1e9), TopBeta(1, 0.0), BiLD(0.0)], ids=str)
@settings(max_examples=20)
@given(draft=trees(), seed=st.integers(0, 50))
def test_at_its_strictest_it_is_match_of_the_target_that_is_certain(
    verifier: Verifier, draft: Draft, seed: int
) -> None:
    scores = table(seed)
    target = lambda text: torch.eye(4, dtype=torch.float64)[scores(text).argmax()]  # noqa: E731
    assert error(verifier.verify, target, fixed(draft), 4) < EXACT


def test_a_draw_that_is_drafted_is_accepted_even_beside_a_likelier_guess() -> None:
    """The walk never leaves the token that plain decoding would emit."""
    target, draft = always(0.6, 0.4), fixed(Draft([0, 1], [-1, -1]))
    found = output_distribution(TopBeta(2, 9.0).verify, target, draft, 1)
    assert difference(found, {(0,): 0.6, (1,): 0.4}) < EXACT


# -- lenience --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lenience", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("parents", [[-1], [-1, -1]])
def test_lenience_by_its_formula(lenience: float, parents: list[int]) -> None:
    """A single candidate is accepted with min(p, q / l); the rest follows the positive part of q - l p."""
    q, p = table(3)(()), table(103)(())
    target, drafts = always(*q.tolist()), sampled(always(*p.tolist()), parents)
    verify = Lenient(lenience).verify
    found = output_distribution(verify, target, drafts, 1)
    if len(parents) == 1:
        accepted = torch.minimum(p, q / lenience)
        left = (q - lenience * p).clamp(min=0)
        expected = accepted + (1 - accepted.sum()) * left / left.sum()
        assert difference(found, {(token,): float(x) for token, x in enumerate(expected)}) < EXACT
        assert all(found[token,] <= float(q[token]) / lenience + EXACT for token in range(4))
    assert difference(found, plain_distribution(target, 1)) > 0.01
    assert expected_length(verify, target, drafts) > expected_length(rejection, target, drafts)


def test_without_lenience_it_is_speculative_sampling() -> None:
    target, drafts = table(3), sampled(table(103), [-1, -1, 0], replacement=False)
    assert error(Lenient(1.0).verify, target, drafts, 3) < EXACT


@pytest.mark.parametrize(("lenience", "path"), [(1.0, []), (0.7, []), (0.6, [0]), (0.2, [0, 1])])
def test_greedy_lenience_compares_with_the_best(lenience: float, path: list[int]) -> None:
    """Drafted are a token 0.65 times as likely as the best one, and after it one 0.25 times as likely."""
    rows = torch.tensor([[0.4, 0.26, 0.34, 0.0], [0.8, 0, 0, 0.2], [1.0, 0, 0, 0]]).log()
    sequence = Sequence([1, 2], SamplingParams(), Key(1), limit=9)
    verdict = Lenient(lenience).verify(Logits(rows), chain([1, 3]), KeyedDraw(sequence))
    assert verdict.path == path
    assert verdict.tokens == ([1, 3] if path == [0, 1] else [1] if path else []) + [0]


# -- the rules alone -------------------------------------------------------------------------------------


def _row(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64)


def test_typical_asks_less_of_a_token_where_the_target_is_uncertain() -> None:
    peaked, flat = _row(0.91, 0.05, 0.02, 0.02), torch.full((20,), 0.05, dtype=torch.float64)
    assert (typical(peaked, 0.09, 0.3) > NO).tolist() == [True, False, False, False]
    # The entropy is log 20, so the threshold is 0.3 / 20.
    assert bool((typical(flat, 0.09, 0.3) > NO).all())
    assert not bool((typical(flat, 0.09, 1.0) > NO).any())


def test_a_token_at_typicals_threshold_does_not_stand() -> None:
    q = _row(0.5, 0.25, 0.25)
    assert (typical(q, 0.25, 100.0) > NO).tolist() == [True, False, False]


def test_top_beta_takes_ties_and_keeps_to_the_gap() -> None:
    logprobs = _row(0.5, 0.2, 0.2, 0.1).log()
    assert (top_beta(logprobs, 2, 9.0) > NO).tolist() == [True, True, True, False]
    assert (top_beta(logprobs, 2, 0.5) > NO).tolist() == [True, False, False, False]
    assert (top_beta(logprobs, 99, math.inf) > NO).all()
    assert (top_beta(_row(1.0, 0.0).log(), 2, math.inf) > NO).tolist() == [True, False]


def test_bild_keeps_what_is_at_its_threshold() -> None:
    logprobs = _row(0.5, 0.25, 0.125, 0.125).log()
    assert (bild(logprobs, -math.log(0.25)) > NO).tolist() == [True, True, False, False]
    assert (bild(_row(1.0, 0.0).log(), math.inf) > NO).tolist() == [True, False]
