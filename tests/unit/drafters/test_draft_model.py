"""The draft model: its cache keeps step with the text, its draws with the target's, in any batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from models import tiny_llama
from outpace.cache import Cache
from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters import load_drafter
from outpace.drafters.models import draft_model
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.support import runner
from outpace.draws.noise import Key, Stream, noisy_argmax
from outpace.engine.engine import Engine
from outpace.sequence import KeyedDraw, Sequence
from outpace.targets import CausalTarget, Output
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget, check_drafter
from parts import first

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 12), *range(1, 12)]]
LONG = SamplingParams(max_new_tokens=41, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=41, temperature=0.8, seed=3, ignore_eos=True)
PENALISED = SamplingParams(
    max_new_tokens=41,
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias={4: 3.0},
    seed=5,
    ignore_eos=True,
)


class Spy(ToyTarget):
    """Notes what each forward is fed."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.fed: list[list[int]] = []

    def forward(self, cache: Cache, batch: Batch, *args: Any, **kwargs: Any) -> Output:
        self.fed.append(batch.widths.tolist())
        return super().forward(cache, batch, *args, **kwargs)


def sequence(prompt: list[int], params: SamplingParams, coupled: bool = True) -> Sequence:
    return Sequence(prompt, params, Key(params.seed or 0, coupled), limit=params.max_new_tokens)


@pytest.mark.parametrize(
    "drafter",
    first(
        2,
        [
            DraftModel(ToyTarget(surprise=0.7)),
            DraftModel(ToyTarget(surprise=0.5), num_speculative_tokens=2, draws="independent"),
            DraftModel(ToyTarget(surprise=0.7), draws="greedy"),
            DraftModel(ToyTarget(surprise=0.7, context=30), num_speculative_tokens=7),
        ],
    ),
)
def test_it_keeps_the_contract(drafter: DraftModel) -> None:
    check_drafter(drafter)


@pytest.mark.parametrize("params", [LONG, SAMPLED, PENALISED])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_draft_model_that_is_the_target_is_always_right(params: SamplingParams, count: int) -> None:
    # Were one row of its cache or one draw wrong, some draft would be rejected. It checks the rows it catches
    # up on, penalties over guessed tokens, and that prompts of all lengths are fed in chunks.
    target = ToyTarget()
    for found in Engine(target, DraftModel(ToyTarget(), count), adaptive=False).generate(PROMPTS, params):
        assert found.stats.accepted == found.stats.drafted
        assert found.stats.steps == -(-41 // (count + 1))


@pytest.mark.parametrize("params", [LONG, PENALISED])
def test_a_tiny_llama_drafts_for_another(params: SamplingParams) -> None:
    model = tiny_llama(vocabulary=40)
    close = tiny_llama(vocabulary=40)
    with torch.no_grad():
        for index, weight in enumerate(close.parameters()):
            torch.manual_seed(index)
            weight += 0.01 * torch.randn_like(weight)
    plain = Engine(model).generate(PROMPTS, params)
    found = Engine(model, DraftModel(close), adaptive=False).generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert 1.5 < sum(g.stats.tokens for g in found) / sum(g.stats.steps for g in found) < 5


def test_a_batch_takes_one_draft_forward_for_each_token() -> None:
    spy = Spy()
    engine = Engine(ToyTarget(), DraftModel(spy, 3), adaptive=False)
    for prompt in PROMPTS:
        engine.add(prompt, LONG)
    engine.step()
    # Prompts of 1, 4, 7 and 22 tokens: those with more than two go in first, but for the root.
    assert spy.fed == [[3, 6, 21], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    spy.fed.clear()
    engine.step()
    # All three were accepted, and the last of them had not been fed.
    assert spy.fed == [[2, 2, 2, 2], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_long_prompts_go_in_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_CHUNK", 4)
    spy = Spy()
    engine = Engine(ToyTarget(), DraftModel(spy, 3), adaptive=False)
    (found,) = engine.generate([PROMPTS[3]], LONG)
    assert spy.fed[:7] == [[4], [4], [4], [4], [4], [2], [1]]
    assert found.stats.accepted == found.stats.drafted


def test_slots_follow_the_sequences_that_leave() -> None:
    target = ToyTarget()
    engine = Engine(target, DraftModel(ToyTarget(surprise=0.7)), adaptive=False)
    params = [SamplingParams(max_new_tokens=n, temperature=0.9, seed=n) for n in (12, 30, 5, 21)]
    plain = Engine(target).generate(PROMPTS, params)
    found = engine.generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert len(engine._draftings[None].shared.runner.cache) == 0


def test_states_may_come_in_any_order_and_not_all_at_once() -> None:
    drafter = DraftModel(ToyTarget(surprise=0.7))

    def drafts(order: Seq[int]) -> list[Draft]:
        shared = drafter.prepare(ToyTarget())
        states = [drafter.start(sequence(prompt, SAMPLED), shared) for prompt in PROMPTS]
        drafter.stop(states[0])  # the last one moves into its slot
        found = drafter.propose([states[place] for place in order])
        return [draft for _, draft in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]

    first = drafts([1, 2, 3])
    assert [d.tokens for d in drafts([3, 1, 2])] == [d.tokens for d in first]
    assert [d.tokens for d in drafts([3, 1])] == [first[0].tokens, first[2].tokens]


def test_proposing_twice_says_the_same() -> None:
    drafter = DraftModel(ToyTarget(surprise=0.7))
    shared = drafter.prepare(ToyTarget())
    states = [drafter.start(sequence(prompt, SAMPLED), shared) for prompt in PROMPTS]
    again = [drafter.propose(states) for _ in range(2)]
    assert [d.tokens for d in again[0]] == [d.tokens for d in again[1]]


def test_coupled_draws_agree_more_often() -> None:
    draft = ToyTarget(surprise=0.7)
    params = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=s, ignore_eos=True) for s in range(6)]

    def tau(draws: str) -> float:
        drafter = load_drafter(f"draft_model:draws={draws}")
        assert isinstance(drafter, DraftModel)
        found = Engine(ToyTarget(), DraftModel(draft, draws=drafter.draws), adaptive=False).generate(
            [PROMPTS[1]] * 6, params
        )
        return sum(g.stats.tokens for g in found) / sum(g.stats.steps for g in found)

    assert tau("coupled") > 1.2 * tau("greedy") > tau("independent")


def drafted(params: SamplingParams, coupled: bool, draws: str) -> Draft:
    drafter = DraftModel(ToyTarget(surprise=0.7), draws=draws)  # type: ignore[arg-type]
    state = drafter.start(sequence(PROMPTS[1], params, coupled), drafter.prepare(ToyTarget()))
    return drafter.propose([state])[0]


def test_a_verifier_that_needs_independent_drafts_gets_them() -> None:
    drafts = {
        (coupled, draws): list(drafted(SAMPLED, coupled, draws).tokens)
        for coupled in (True, False)
        for draws in ("coupled", "independent")
    }
    assert drafts[False, "coupled"] == drafts[False, "independent"] == drafts[True, "independent"]
    assert drafts[True, "coupled"] != drafts[True, "independent"]


def test_distributions_come_with_sampled_tokens_only() -> None:
    found = drafted(SAMPLED, True, "coupled")
    assert found.distributions is not None and sorted(found.distributions) == [-1, 0, 1, 2]
    assert all(row.dtype == torch.float64 and row.shape == (32,) for row in found.distributions.values())
    assert drafted(SAMPLED, True, "greedy").distributions is None
    assert drafted(LONG, True, "coupled").distributions is None


def test_drafts_are_drawn_by_the_streams_they_say() -> None:
    text = sequence(PROMPTS[1], SAMPLED)
    draw, row = KeyedDraw(text), torch.linspace(-1, 1, 32).roll(7)
    scores = row / 0.8
    token, distribution = draw.draft(row, [4, 5], node=2)
    assert token == noisy_argmax(scores, text.key.target(2))
    assert distribution is not None
    torch.testing.assert_close(distribution, scores.double().softmax(dim=-1), atol=1e-6, rtol=0)
    token, _ = draw.draft(row, [4, 5], node=2, coupled=False)
    assert token == noisy_argmax(scores, text.key.node(Stream.DRAFT, 0, 2))
    greedy = KeyedDraw(sequence(PROMPTS[1], SamplingParams(repetition_penalty=9.0)))
    assert greedy.draft(row, [], node=0) == (int(row.argmax()), None)
    assert greedy.draft(row, [int(row.argmax())], node=0) != (int(row.argmax()), None)


def test_rejection_keeps_a_perfect_draft() -> None:
    target = ToyTarget()
    for found in Engine(target, DraftModel(ToyTarget()), "rejection").generate(PROMPTS, SAMPLED):
        assert found.stats.accepted == found.stats.drafted > 0


def test_stops_drafting_at_a_token_that_ends_the_text() -> None:
    eos = Engine(ToyTarget()).generate([PROMPTS[1]], LONG)[0].tokens[1]
    text = Sequence(PROMPTS[1], LONG, Key(0), limit=40, eos_token_ids=frozenset([eos]))
    drafter = DraftModel(ToyTarget(), 5)
    (draft,) = drafter.propose([drafter.start(text, drafter.prepare(ToyTarget()))])
    assert len(draft) == 2 and draft.tokens[-1] == eos


@pytest.mark.parametrize(("context", "length"), [(9, 4), (8, 3), (6, 1), (5, 0), (4, 0), (1, 0)])
def test_proposes_nothing_past_its_own_context(context: int, length: int) -> None:
    # Six tokens are committed; K guesses put K - 1 rows behind them.
    drafter = DraftModel(ToyTarget(context=context), 4)
    state = drafter.start(sequence([3, 9, 2, 7, 4, 5], LONG), drafter.prepare(ToyTarget()))
    assert len(drafter.propose([state])[0]) == length


def test_a_draft_model_runs_to_the_end_of_a_shorter_context() -> None:
    target = CausalTarget(tiny_llama(vocabulary=40))
    drafter = DraftModel(tiny_llama(vocabulary=40, context=32))
    plain = Engine(target).generate(PROMPTS, LONG)
    found = Engine(target, drafter, adaptive=False).generate(PROMPTS, LONG)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert found[0].stats.accepted > 20


def test_vocabularies_must_agree() -> None:
    with pytest.raises(OutpaceError, match="draft model has 48 token ids and the target 32"):
        Engine(ToyTarget(), DraftModel(ToyTarget(vocabulary=48)))


def test_a_model_is_loaded_from_a_path(tmp_path: Path) -> None:
    model = tiny_llama(vocabulary=40)
    model.float().save_pretrained(tmp_path)
    drafter = load_drafter(f"draft_model:model={tmp_path},num_speculative_tokens=3")
    target = outpace.Target(model.double())
    engine = Engine(target, drafter, adaptive=False)
    loaded = engine._draftings[None].shared.model
    assert loaded.model.dtype == torch.float64
    found = engine.generate(PROMPTS, LONG)
    assert all(g.stats.accepted == g.stats.drafted for g in found)


def test_engines_share_a_model_that_is_named_while_they_need_it(tmp_path: Path) -> None:
    tiny_llama(vocabulary=40).save_pretrained(tmp_path)
    target = CausalTarget(tiny_llama(vocabulary=40))
    first, second = (Engine(target, DraftModel(str(tmp_path), count), adaptive=False) for count in (2, 3))
    assert first._draftings[None].shared.model is second._draftings[None].shared.model
    assert first._draftings[None].shared.runner.cache is not second._draftings[None].shared.runner.cache
    other = Engine(
        CausalTarget(tiny_llama(vocabulary=40, dtype=torch.float32)), DraftModel(tmp_path), adaptive=False
    )
    assert other._draftings[None].shared.model.model.dtype == torch.float32
    gone = weakref.ref(first._draftings[None].shared.model)
    del first, second, other
    gc.collect()
    assert gone() is None


def test_a_path_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match=f"cannot load '{tmp_path}'"):
        Engine(ToyTarget(), DraftModel(str(tmp_path)))


def test_the_embedded_draft_model_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_llama(vocabulary=32).save_pretrained(tmp_path)
    monkeypatch.setattr(draft_model, "nano_draft_path", lambda: tmp_path)
    assert Engine(ToyTarget(), "draft_model")._draftings[None].shared.model.vocabulary == 32
