"""Token recycling: the tree's shape, what is learnt from a step, and the drafts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.draws.noise import Key
from outpace.engine.engine import Engine
from outpace.policy.plan import DraftPlan, Outcome
from outpace.sequence import Sequence, Step
from outpace.targets import Output
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import path_to
from outpace_lab.drafters.token_recycling import (
    Candidates,
    TokenRecycling,
    TokenRecyclingState,
    chance,
    template,
)
from parts import first
from paths import distinct_paths

PARAMS = SamplingParams(max_new_tokens=60, temperature=0.6, seed=4, ignore_eos=True)


@dataclass(frozen=True)
class Recorded(TokenRecycling):
    steps: list[tuple[Step, int]] = field(default_factory=list)
    states: list[TokenRecyclingState] = field(default_factory=list)

    def learn(self, state: TokenRecyclingState, step: Step) -> None:
        super().learn(state, step)
        self.steps.append((step, state.sequence.tokens[-len(step.tokens) - 1]))
        self.states.append(state)


@pytest.mark.parametrize(
    "drafter",
    first(
        1,
        [
            TokenRecycling(),
            TokenRecycling(max_nodes=7, top_k=2, share=False),
            TokenRecycling(max_nodes=5, top_k=1),
            TokenRecycling(max_nodes=50, top_k=40),
        ],
    ),
)
def test_it_keeps_the_contract(drafter: TokenRecycling) -> None:
    check_drafter(drafter)


def ranks_to(nodes: int, top_k: int) -> list[tuple[int, ...]]:
    """The ranks on the way to each node of the template."""
    tree = template(nodes, top_k)
    rank = {
        int(node): int(r) for layer, _, ranks in tree.layers for node, r in zip(layer, ranks, strict=True)
    }
    return [tuple(rank[n] for n in path_to(tree.parents, node)) for node in range(nodes)]


@pytest.mark.parametrize(("nodes", "top_k"), [(1, 1), (6, 1), (12, 2), (30, 3), (40, 8)])
def test_the_tree_has_the_nodes_most_likely_accepted(nodes: int, top_k: int) -> None:
    paths = ranks_to(nodes, top_k)
    every = [p for size in range(1, 7) for p in itertools.product(range(top_k), repeat=size) if sum(p) < 12]
    worth = sorted((math.prod(map(chance, path)) for path in every), reverse=True)
    assert len(set(paths)) == nodes
    assert [math.prod(map(chance, path)) for path in paths] == pytest.approx(worth[:nodes])


def test_the_tree_of_a_smaller_budget_is_the_beginning() -> None:
    paths = ranks_to(80, 8)
    for nodes in (1, 17, 79):
        assert ranks_to(nodes, 8) == paths[:nodes]
    assert template(0, 8).parents == ()


def state(follow: dict[int, list[int]], text: list[int], **params: object) -> TokenRecyclingState:
    """A state with a vocabulary of 20 tokens."""
    width = max(map(len, follow.values()))
    known = np.full((21, width), 20, dtype=np.int32)
    for token, candidates in follow.items():
        known[token] = candidates
    sequence = Sequence(text, SamplingParams(**params), Key(0), limit=100)  # type: ignore[arg-type]
    return TokenRecyclingState(sequence, Candidates(known))


def test_it_drafts_candidates_of_candidates() -> None:
    random = np.random.default_rng(0)
    follow = {token: random.permutation(20)[:3].tolist() for token in range(20)}
    found = TokenRecycling(max_nodes=25, top_k=3).draft(state(follow, [7, 3]))
    expected = set()
    for ranks in ranks_to(25, 3):
        text = [3]
        for rank in ranks:
            text.append(follow[text[-1]][rank])
        expected.add(tuple(text[1:]))
    assert distinct_paths(found) == expected
    assert len(found) == 25


def test_nothing_follows_what_is_not_known_or_ends_the_text() -> None:
    follow = {3: [4, 5], 4: [6, 7], 6: [4, 5]}
    drafter = TokenRecycling(max_nodes=14, top_k=2)
    assert (3 in follow) and len(drafter.draft(state(follow, [9]))) == 0
    found = distinct_paths(drafter.draft(state(follow, [3])))
    assert {(4,), (5,), (4, 6), (4, 7), (4, 6, 4)} <= found
    assert not any(path[0] == 5 and len(path) > 1 for path in found)
    stopped = distinct_paths(drafter.draft(state(follow, [3], stop_token_ids=[6])))
    assert stopped == {(4,), (5,), (4, 6), (4, 7)}


def test_a_budget_cuts_the_least_likely() -> None:
    follow = {token: [(token + 1) % 20, (token + 2) % 20] for token in range(20)}
    drafter, made = TokenRecycling(max_nodes=30, top_k=2), state(follow, [3])
    whole = drafter.draft(made)
    for budget in (0, 1, 9, 40):
        made.sequence.budget = budget
        found = drafter.draft(made)
        assert (list(found.tokens), list(found.parents)) == (
            list(whole.tokens[:budget]),
            list(whole.parents[:budget]),
        )


@dataclass
class Seldom:
    """A policy that drafts in one of ``every`` steps."""

    every: int
    timed: bool = False
    steps: int = 0

    def plan(self, batch: int) -> DraftPlan:
        self.steps += 1
        return DraftPlan(0 if self.steps % self.every else 6)

    def learn(self, outcome: Outcome) -> None:
        pass


class OneBuffer(ToyTarget):
    """A target whose logits are valid only until the next forward, as llama.cpp's are."""

    def forward(self, *given: Any, **options: Any) -> Output:
        output = super().forward(*given, **options)
        if output.logits is None:
            return output
        self.buffer = getattr(self, "buffer", torch.empty(64, self.vocabulary))
        own = self.buffer[: len(output.logits)]
        own.copy_(output.logits)
        return Output(own, output.spans, output.hidden)


@pytest.mark.parametrize("every", [1, 3, 40])  # 40: more plain steps than rows that wait
def test_rows_of_plain_steps_are_ranked_before_they_are_needed(every: int) -> None:
    known: dict[int, list[int]] = {}
    drafts = 0

    @dataclass(frozen=True)
    class Checked(TokenRecycling):
        def draft(self, state: TokenRecyclingState) -> Draft:
            nonlocal drafts
            drafts += 1
            found = super().draft(state)
            follow = state.candidates.follow
            assert {t: row.tolist() for t, row in enumerate(follow) if row[0] < 32} == known
            assert (len(found) > 0) == (state.sequence.tokens[-1] in known)
            return found

        def learn(self, state: TokenRecyclingState, step: Step) -> None:
            nodes = [*range(len(step.draft)), -1, *step.path]
            tokens = [state.sequence.tokens[-len(step.tokens) - 1], *step.draft.tokens]
            for node in nodes:
                known[tokens[node + 1]] = step.logits[node].topk(4).indices.tolist()
            super().learn(state, step)

    engine = Engine(OneBuffer(context=None), Checked(top_k=4), adaptive=Seldom(every))
    found = engine.generate([[5, 6]], dataclasses.replace(PARAMS, max_new_tokens=150))
    assert (
        found[0].tokens
        == Engine(ToyTarget(context=None))
        .generate([[5, 6]], dataclasses.replace(PARAMS, max_new_tokens=150))[0]
        .tokens
    )
    assert drafts >= 3 and len(known) > 20


@pytest.mark.parametrize("share", [True, False])
def test_it_learns_of_every_row_and_believes_the_accepted_one(share: bool) -> None:
    drafter = Recorded(max_nodes=30, top_k=4, share=share)
    engine = Engine(ToyTarget(context=None), drafter, adaptive=False)
    generations = engine.generate([[5, 6]], PARAMS)
    known: dict[int, list[int]] = {}
    rejected = twice = 0
    for step, root in drafter.steps:
        nodes = [*range(len(step.draft)), -1, *step.path]
        tokens = [root, *step.draft.tokens]
        twice += any(tokens.count(step.draft.tokens[node]) > 1 for node in step.path)
        rejected += len(step.draft) - len(step.path)
        for node in nodes:
            known[tokens[node + 1]] = step.logits[node].topk(4).indices.tolist()
    assert rejected > 100 and twice > 5
    follow = drafter.states[0].candidates.follow
    assert {t: row.tolist() for t, row in enumerate(follow) if row[0] < 32} == known
    assert generations[0].stats.mean_accepted_length > 1.5


def test_sequences_of_an_engine_share_what_they_learn_or_not() -> None:
    target = ToyTarget(context=None)
    first: dict[bool, Draft] = {}
    for share in (True, False):
        drafter = Recorded(share=share)
        engine = Engine(target, drafter, adaptive=False)
        engine.generate([[5, 6]], PARAMS)
        drafter.steps.clear()
        engine.generate([[7, 6]], PARAMS)
        first[share] = drafter.steps[0][0].draft
        other = Recorded(share=share)
        Engine(target, other, adaptive=False).generate([[7, 6]], PARAMS)
        assert len(other.steps[0][0].draft) == 0
    assert len(first[True]) > 10
    assert len(first[False]) == 0


def test_more_candidates_than_tokens_are_all_of_them() -> None:
    shared = TokenRecycling(top_k=50).prepare(ToyTarget(vocabulary=3)).shared.follow
    assert shared.shape == (4, 3)
    assert torch.from_numpy(shared).eq(3).all()


@pytest.mark.parametrize("option", ["max_nodes", "top_k"])
def test_a_wrong_option_is_named(option: str) -> None:
    with pytest.raises(OutpaceError, match=f"token_recycling: {option} must be at least 1, not 0"):
        TokenRecycling(**{option: 0})


def test_what_it_says_of_trees() -> None:
    assert TokenRecycling().trees
    assert not TokenRecycling(top_k=1).trees
    assert not TokenRecycling(max_nodes=1).trees
