"""The rounded self drafts on the target's cache, follows its weights, and stays among its own rows.

Tokens are exact whatever is drafted, so the faults of a draft are seen by what is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import outpace
from models import tiny_llama
from outpace.core import Draft, OutpaceError, SamplingParams, UnsupportedModel
from outpace.drafters import load_drafter
from outpace.drafters.models import rounded_self
from outpace.drafters.models.rounded_self import RoundedSelf
from outpace.drafters.support.worth import DraftSpeed, Lately, Missed, Rates
from outpace.engine.engine import Engine
from outpace.learned import frequent
from outpace.native.layers import functions
from outpace.targets import Target
from outpace.targets.batch import Batch
from outpace.targets.stock import rounded
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import chain

pytestmark = pytest.mark.skipif(isinstance(functions(torch.float32), str), reason="needs a C compiler")
PROMPTS = [[5, 17, 300, 22, 8], [41, 7, 99], [12, 250, 31, 77, 18, 4, 60], [9]]
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.9, seed=5, ignore_eos=True)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def embedded(dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=dtype)


def steps(engine: Engine, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> int:
    return sum(generation.stats.steps for generation in engine.generate(prompts, params))


def drafting(target: Any, drafter: str = "self:bits=8,branches=1") -> Engine:
    return Engine(target, drafter, adaptive=False)


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    target = Target(tiny_llama(vocabulary=40, layers=2))
    for drafter in (RoundedSelf(), RoundedSelf(bits=8, num_speculative_tokens=3, branches=1)):
        check_drafter(drafter, target)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_agrees_with_a_model_of_any_dtype(dtype: torch.dtype, params: SamplingParams) -> None:
    target = Target(embedded(dtype), check=False)
    plain = Engine(target).generate(PROMPTS, params)
    found = drafting(target).generate(PROMPTS, params)
    if target.bit_exact or dtype == torch.float64:
        assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert 3 * sum(g.stats.steps for g in found) < sum(g.stats.steps for g in plain)


def test_a_batch_drafts_as_each_sequence_does_alone() -> None:
    # A draft that read the rows of another sequence would seldom be accepted.
    target = Target(embedded(), check=False)
    together = steps(drafting(target))
    alone = sum(steps(drafting(target), [prompt]) for prompt in PROMPTS)
    assert together <= 1.1 * alone


def test_no_row_of_a_draft_stays_in_the_cache() -> None:
    target = Target(embedded(), check=False)
    engine = drafting(target)
    sequence = engine.add(PROMPTS[0], GREEDY)
    while engine.sequences:
        engine.step()
        if sequence.place is not None:
            assert sequence.place.rows == len(sequence.tokens) - 1
    plain = Engine(target).generate([PROMPTS[0]], GREEDY)[0].tokens
    assert sequence.output == plain


def guided(
    target: Any, continuation: list[int], params: SamplingParams, wrong: int = 0
) -> tuple[list[tuple[int, ...]], int]:
    """The tokens of its chains where another drafter has guesses, and the number of its forwards.

    Args:
        continuation: what the other drafter guesses.
        wrong: one guess in this many is replaced by another token; 0 for none.
    """
    prompt, drafter, forwards = PROMPTS[0], RoundedSelf(branches=1), 0
    guesses = [t + bool(wrong and place % wrong == 1) for place, t in enumerate(continuation)]
    engine = Engine(target)
    sequence, shared = engine.add(prompt, params), drafter.prepare(target)
    inner = shared.part.now().forward

    def forward(*given: Any, **options: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return inner(*given, **options)

    part = SimpleNamespace(make=shared.part.make, now=lambda: SimpleNamespace(forward=forward))
    shared = replace(shared, part=part, few=None)
    engine.step()
    state, drafts = drafter.start(sequence, shared), []
    if continuation:
        drafter.guide(
            state, lambda tokens, most: likely(guesses[sequence.output_length + len(tokens) :][:most])
        )
    while len(drafts) < 6:
        drafter.propose([state])
        drafts.append(tuple(state.tree.tokens))  # also those that are not worth a row
        engine.step()
    return drafts, forwards


def likely(tokens: list[int]) -> Draft:
    return replace(chain(tokens), chances=[0.99**place for place in range(len(tokens))])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_guesses_of_another_drafter_save_forwards_and_change_no_draft(params: SamplingParams) -> None:
    target = Target(embedded(torch.float32), check=False)
    text = Engine(target).generate([PROMPTS[0]], params)[0].tokens
    alone, forwards = guided(target, [], params)
    right, same = guided(target, text, params)
    mixed, some = guided(target, text, params, wrong=3)
    # A guess that is confirmed takes no forward.
    assert sum(map(len, right)) / same > sum(map(len, mixed)) / some > sum(map(len, alone)) / forwards
    for own, guessed, other in zip(alone, right, mixed, strict=True):
        assert own and guessed[: len(own)] == own == other[: len(own)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rare_tokens_are_left_out_of_a_draft_and_not_of_the_text(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    target = Target(embedded(torch.float32), check=False)
    if not target.plan.native:
        pytest.skip("its head is not cut here")
    plain = [generation.tokens for generation in Engine(target).generate(PROMPTS, params)]
    few = max(map(max, plain)) // 2
    drafter = RoundedSelf(bits=8, branches=1)
    monkeypatch.setattr(frequent, "_COMMON", few)
    monkeypatch.setattr(rounded_self, "_cuts", lambda active: True)
    engine = Engine(target, drafter, adaptive=False)
    found = engine.generate(PROMPTS, params)
    assert [generation.tokens for generation in found] == plain
    # Texts repeat their rare tokens, which are then drafted too.
    assert 2 * sum(g.stats.steps for g in found) < sum(len(g.tokens) for g in found)


def by_load_state_dict(model: Any, weights: dict[str, Any]) -> None:
    model.load_state_dict(weights)


def by_data(model: Any, weights: dict[str, Any]) -> None:
    for name, weight in model.named_parameters():
        weight.data.copy_(weights[name])


@pytest.mark.parametrize("write", [by_load_state_dict, by_data])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_that_change_are_rounded_anew(dtype: torch.dtype, write: Callable[..., None]) -> None:
    model = embedded(dtype)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():  # another model, whose drafts the one to come would seldom accept
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight.flip(0))
    engine = drafting(Target(model, check=False))
    steps(engine)
    write(model, weights)
    assert steps(engine) <= 1.1 * steps(drafting(Target(embedded(dtype), check=False)))


def test_it_reads_packed_weights_where_the_models_own_were_freed() -> None:
    released = Target(embedded(torch.float32), check=False)
    if not released.release():
        pytest.skip("its layers are not packed here")
    assert steps(drafting(released)) == steps(drafting(Target(embedded(torch.float32), check=False)))


def test_independent_draws_come_with_their_distributions() -> None:
    target = Target(embedded(), check=False)
    found = Engine(target, "self:bits=8", "rejection").generate(PROMPTS, SAMPLED)
    assert sum(g.stats.steps for g in found) < sum(len(g.tokens) for g in found)
    with pytest.raises(OutpaceError, match="branches=1"):
        Engine(target, "self", "block")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_target_with_as_few_bits_is_told_that_it_gains_nothing(bits: int) -> None:
    target = Target(embedded(torch.bfloat16), check=False, quantise="int8" if bits == 8 else "int4")
    with pytest.raises(UnsupportedModel, match="gains nothing"):
        Engine(target, f"self:bits={bits}")
    if bits == 8:
        assert target.rounded(4)


def test_what_has_no_rounded_self_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match="ToyTarget has no rounded self"):
        Engine(ToyTarget(), "self")
    with pytest.raises(UnsupportedModel, match="leave static out"):
        Engine(Target(tiny_llama(), static=True, check=False), "self")
    monkeypatch.setattr(rounded, "free_bytes", lambda device: 1000)
    with pytest.raises(UnsupportedModel, match="more than half of the 0 MiB"):
        Engine(Target(tiny_llama(), check=False), "self")
    with pytest.raises(OutpaceError, match="bits must be 4 or 8"):
        load_drafter("self:bits=3")


def test_rounded_rows_leave_the_targets_own_as_they_are() -> None:
    target = Target(embedded(), check=False)
    cache = target.new_cache()
    slot = cache.allocate()
    before = target.forward(cache, Batch.of({slot: PROMPTS[0]})).logits_of(slot).clone()
    cache.keep({})
    other = target.rounded(4).forward(cache, Batch.of({slot: PROMPTS[0]})).logits_of(slot).clone()
    cache.keep({})
    after = target.forward(cache, Batch.of({slot: PROMPTS[0]})).logits_of(slot)
    assert torch.equal(before, after) and not torch.equal(before, other)
    assert target.rounded(4) is target.rounded(4)  # engines share one


def test_a_chain_ends_where_a_row_is_worth_more() -> None:
    # With a row that costs nearly a step, only what is sure is drafted; with one for nothing, all.
    target = Target(embedded(), check=False)
    drafter = RoundedSelf(branches=1)
    lengths = []
    for seconds in (0.0, 0.45):
        shared = drafter.prepare(target)
        shared.took(1, seconds)
        engine = Engine(target)
        sequence = engine.add(PROMPTS[0], GREEDY)
        engine.step()
        sequence.plain_seconds, sequence.row_cost = 1.0, 0.02
        shared.rates[True].count(0, 0.5, right=False)
        state = drafter.start(sequence, shared)
        drafted = 0
        for _ in range(8):
            shared.forwards[1] = Lately()
            shared.took(1, seconds)
            drafted += len(drafter.propose([state])[0])
            engine.step()
        lengths.append(drafted)
    assert lengths[1] < lengths[0]


def test_a_cut_head_has_what_texts_have() -> None:
    target: Any = Target(embedded(torch.float32), check=False)
    part = target.rounded(8)
    if not part.head_share:
        pytest.skip("its head is not cut here")
    few, cache = part.few(100), target.new_cache()
    slot = cache.allocate()
    batch = Batch.of({slot: PROMPTS[0]})
    whole = part.forward(cache, batch).logits_of(slot).clone()
    rare = target.vocabulary // 2
    assert few.add([3, rare, rare, 50]) == 2 and few.add([rare + 1 - rare % 2]) == 0
    for token in (rare, *range(200, target.vocabulary, 97)):
        few.add([token])
        assert token in few.ids
    for _ in range(2):
        cache.keep({})
        found = few.now().forward(cache, batch).logits_of(slot)
        assert found.shape == (len(PROMPTS[0]), len(few.ids)) and len(few.ids.unique()) == len(few.ids)
        assert torch.equal(found, whole[:, few.ids])
        few.drop()  # as when weights are rounded anew


def test_a_head_is_cut_where_little_is_missed() -> None:
    missed = Missed()
    assert missed.pays(0.1, tokens=4) and not missed.pays(0.03, tokens=4)
    missed.count(20, tokens=200)
    assert not missed.pays(0.1, tokens=4)
    missed.count(0, tokens=2000)
    assert missed.pays(0.1, tokens=4)


def test_rates_follow_what_is_seen() -> None:
    rates = Rates()
    assert rates.chance(0, 0.6) == pytest.approx(0.6)  # as stated, until something is counted
    for _ in range(50):
        rates.count(0, 0.6, right=True)
        rates.count(1, 0.6, right=False)
    assert rates.chance(0, 0.6) > 0.9 and rates.chance(1, 0.6) < 0.1
    assert rates.chance(0, 0.1) == pytest.approx(0.1) and rates.usual > 0.95
    speed = DraftSpeed()
    assert speed.tokens == 1
    for _ in range(200):
        speed.step(4, 2.0)
    assert speed.tokens == pytest.approx(2, rel=0.05)
