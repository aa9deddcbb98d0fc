"""Trees of a draft model: exact in every shape and with every way to draw, and better than a chain."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.draws.noise import Key, Stream, gumbel, noisy_argmax, noisy_top
from outpace.engine.engine import Engine
from outpace.sequence import Sequence
from outpace.targets import Output
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import children, depths, is_chain
from parts import first

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
GREEDY = SamplingParams(max_new_tokens=25, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=25, temperature=1.0, seed=3, ignore_eos=True)
SHAPES: dict[str, dict[str, Any]] = {
    "branching": {"branching": "3x2"},
    "sequoia": {"acceptance": "0.6/0.2/0.1", "max_nodes": 9, "num_speculative_tokens": 5},
    "confident": {"expand": 3, "max_nodes": 9},
}


def draft_model() -> ToyTarget:
    return ToyTarget(surprise=0.6)


def one_draft(
    params: SamplingParams,
    coupled: bool = True,
    budget: int | None = None,
    model: ToyTarget | None = None,
    **options: Any,
) -> Draft:
    drafter = DraftModel(model or draft_model(), **options)
    text = Sequence(PROMPTS[1], params, Key(params.seed or 0, coupled), limit=params.max_new_tokens)
    text.budget = budget
    return drafter.propose([drafter.start(text, drafter.prepare(ToyTarget()))])[0]


@pytest.mark.parametrize(("shape", "parents"), [("sequoia", [-1, 0, 1]), ("branching", [-1, -1, -1])])
def test_a_smaller_budget_drafts_the_likeliest_nodes(shape: str, parents: list[int]) -> None:
    assert list(one_draft(GREEDY, budget=3, **SHAPES[shape]).parents) == parents
    assert one_draft(GREEDY, budget=99, **SHAPES[shape]) == one_draft(GREEDY, **SHAPES[shape])


def test_a_smaller_budget_feeds_the_draft_model_no_more_than_it_drafts() -> None:
    class Counted(ToyTarget):
        rows = 0

        def forward(self, cache: Any, batch: Batch, *args: Any, **options: Any) -> Output:
            self.rows += len(batch.tokens)
            return super().forward(cache, batch, *args, **options)

    fed = []
    for budget in (None, 2):
        model = Counted(surprise=0.6)
        one_draft(GREEDY, model=model, budget=budget, **SHAPES["confident"])
        fed.append(model.rows)
    # The prompt, and of the tree the better of two nodes of the first of two layers; else three nodes of each
    # of four layers but the last, without one that is not among the nine best.
    assert fed == [len(PROMPTS[1]) + 3 * 3 - 1, len(PROMPTS[1]) + 1]


@pytest.mark.parametrize(
    "options",
    first(
        1,
        [
            {"branching": "2x2", "draws": "independent", "replacement": True, "num_speculative_tokens": 2},
            SHAPES["branching"],
            SHAPES["confident"],
            SHAPES["sequoia"],
            {"min_confidence": 0.4, "draws": "independent", "branching": "2", "confidence": "token"},
        ],
    ),
)
def test_trees_keep_the_contract(options: dict[str, Any]) -> None:
    check_drafter(DraftModel(draft_model(), **options))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("draws", ["coupled", "independent", "greedy"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_plain_decoding(shape: str, draws: Any, params: SamplingParams) -> None:
    if shape == "confident" and draws == "independent":
        pytest.skip("refused")
    drafter = DraftModel(draft_model(), draws=draws, min_confidence=0.05, **SHAPES[shape])
    found = Engine(ToyTarget(), drafter, adaptive=False).generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(ToyTarget()).generate(PROMPTS, params)]
    assert sum(g.stats.accepted for g in found) > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["branching", "confident"])
def test_a_tree_accepts_more_than_the_chain(shape: str, temperature: float) -> None:
    def accepted(**options: Any) -> float:
        total = steps = 0
        for seed in range(3):
            params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)
            for found in Engine(ToyTarget(), DraftModel(draft_model(), **options), adaptive=False).generate(
                PROMPTS, params
            ):
                total, steps = total + found.stats.tokens, steps + found.stats.steps
        return total / steps

    assert accepted(**SHAPES[shape]) > 1.2 * accepted()


def test_each_layer_of_all_trees_is_one_forward() -> None:
    fed: list[list[int]] = []

    class Spy(ToyTarget):
        def forward(self, cache: Any, batch: Batch, *args: Any, **more: Any) -> Output:
            fed.append(batch.widths.tolist())
            return super().forward(cache, batch, *args, **more)

    engine = Engine(ToyTarget(), DraftModel(Spy(surprise=0.6), 3, branching="3x2"), adaptive=False)
    for prompt in PROMPTS[:2]:
        engine.add(prompt, GREEDY)
    engine.step()
    # The prompt but for its root; the roots; three nodes each; their six children. The leaves are not fed.
    assert fed == [[3], [1, 1], [3, 3], [6, 6]]
    fed.clear()
    engine.step()
    assert all(width <= 2 for width in fed[0]) and fed[1:] == [[3, 3], [6, 6]]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("options", [{}, *SHAPES.values()])
def test_the_draft_cache_holds_the_rows_of_the_text(options: dict[str, Any], params: SamplingParams) -> None:
    engine = Engine(ToyTarget(), DraftModel(draft_model(), **options), adaptive=False)
    sequences = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    while engine.sequences:
        engine.step()
        if len(sequences) == 2:
            sequences.append(engine.add(PROMPTS[2], params))
        for active in engine._batch.active:
            state, text = active.state, active.sequence.tokens
            runner = state.shared.runner
            runner.rewind(state.track, text)  # as the next proposal will
            count = len(state.track.tokens)
            assert state.track.tokens == text[:count] and len(text) - count in (1, 2)
            cache = runner.model.new_cache()
            slot = cache.allocate()
            runner.model.forward(cache, Batch.of({slot: text[:count]}, None))
            cache.keep({slot: range(count)})
            for layer in range(len(cache.layers)):
                pairs = zip(cache.rows(layer, slot), runner.cache.rows(layer, state.track.slot), strict=True)
                for fresh, kept in pairs:
                    torch.testing.assert_close(kept, fresh, atol=1e-12, rtol=0)
    assert len(engine._draftings[None].shared.runner.cache) == 0


def test_without_replacement_siblings_differ_and_with_it_they_need_not() -> None:
    sampled = [SamplingParams(max_new_tokens=9, temperature=2.0, seed=seed) for seed in range(20)]
    equal = 0
    for params in sampled:
        without = one_draft(params, coupled=False, branching="4", num_speculative_tokens=1)
        assert len(set(without.tokens)) == 4 and not without.replacement
        repeated = one_draft(
            params, branching="4", num_speculative_tokens=1, draws="independent", replacement=True
        )
        assert repeated.replacement and repeated.distributions is not None
        assert without.tokens[0] == repeated.tokens[0]  # the first draw is the same
        equal += len(set(repeated.tokens)) < 4
    assert equal > 0


def test_coupled_candidates_are_the_best_with_the_targets_noise() -> None:
    draft = one_draft(SAMPLED, branching="3", num_speculative_tokens=2)
    assert draft.distributions is not None
    for node, below in [(-1, children(draft.parents)[-1]), (0, children(draft.parents)[0])]:
        noise = gumbel(Key(3).target(depths(draft.parents)[below[0]]), 32, torch.device("cpu"))
        best = (draft.distributions[node].log() + noise).topk(len(below)).indices.tolist()
        assert [draft.tokens[child] for child in below] == best


def test_gumbel_top_k_begins_with_the_draw_and_leaves_out_what_is_excluded() -> None:
    scores = torch.tensor([0.3, -torch.inf, 1.0, 0.1, -torch.inf])
    for seed in range(20):
        word = Key(seed).node(Stream.DRAFT, 0, 0)
        tokens, shares = noisy_top(scores, word, 5)
        assert tokens[0] == noisy_argmax(scores, word)
        assert sorted(tokens) == [0, 2, 3] and shares == sorted(shares, reverse=True)
        assert float(torch.tensor(shares).exp().sum()) == pytest.approx(1)


def test_grown_trees_are_point_masses_under_a_verifier_that_needs_independent_draws() -> None:
    draft = one_draft(SAMPLED, coupled=False, **SHAPES["confident"])
    assert draft.distributions is None and not is_chain(draft.parents)
    greedy = one_draft(SAMPLED, draws="greedy", **SHAPES["confident"])
    assert (draft.tokens, draft.parents) == (greedy.tokens, greedy.parents)


@pytest.mark.parametrize("coupled", [False, True])
def test_drafts_follow_the_bias_of_the_request(coupled: bool) -> None:
    options: dict[str, Any] = {"branching": "4", "num_speculative_tokens": 1}
    likely = one_draft(SAMPLED, coupled, **options).tokens
    biased = dataclasses.replace(SAMPLED, logit_bias=dict.fromkeys(likely[:2], -1e9))
    assert not set(likely[:2]) & set(one_draft(biased, coupled, **options).tokens)


@pytest.mark.parametrize("confidence", ["path", "token"])
def test_drafting_stops_where_the_draft_model_is_unsure(confidence: Any) -> None:
    whole = one_draft(SAMPLED, coupled=False, num_speculative_tokens=8)
    assert whole.distributions is not None and len(whole) == 8
    sure = 1.0
    expected = 0
    for node, token in enumerate(whole.tokens):
        row = whole.distributions[node - 1]
        if (sure if confidence == "path" else 1.0) * float(row.max()) < 0.45:
            break
        sure *= float(row[token])
        expected += 1
    assert 0 < expected < 8
    found = one_draft(
        SAMPLED, coupled=False, num_speculative_tokens=8, min_confidence=0.45, confidence=confidence
    )
    assert found.tokens == whole.tokens[:expected]
    assert len(one_draft(GREEDY, num_speculative_tokens=8, min_confidence=1.0)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replacement": True}, "give draws=independent"),
        ({"replacement": True, "draws": "independent"}, "a chain has none; give branching"),
        ({"confidence": "token"}, "applies to min_confidence; give that too"),
        ({"expand": 2, "max_nodes": 4, "draws": "independent"}, "cannot be independent draws"),
        ({"min_confidence": 1.5}, "min_confidence must be between 0 and 1"),
        ({"confidence": "node"}, "confidence must be 'path' or 'token'"),
        ({"vocabulary": "text", "branching": "2"}, "vocabulary=text drafts chains"),
        ({"vocabulary": "other"}, "vocabulary must be 'same' or 'intersection' or 'text'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        DraftModel(**options)


def test_a_verifier_of_chains_refuses_trees() -> None:
    assert not DraftModel(branching="1x1").trees
    with pytest.raises(OutpaceError, match="verifies chains"):
        Engine(ToyTarget(), DraftModel(draft_model(), branching="2"), "block")
