"""Suffix decoding: drafts by match, memory, and unchanged tokens."""

from __future__ import annotations

import random

import pytest
import torch

from dictation import Dictation
from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.copying.suffix import Context, Suffix, SuffixState
from outpace.draws.logits import Logits
from outpace.draws.noise import Key
from outpace.engine.engine import Engine
from outpace.sequence import Sequence, Step
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import is_chain
from paths import distinct_paths

TEXT = list(range(200, 260))


def draft(text: list[int], eos: frozenset[int] = frozenset(), **options: float) -> Draft:
    drafter = Suffix(**options)  # type: ignore[arg-type]
    sequence = Sequence(text, SamplingParams(), Key(0), limit=100, eos_token_ids=eos)
    return drafter.draft(drafter.start(sequence, drafter.prepare(ToyTarget())))


@pytest.mark.parametrize(
    "drafter",
    [
        Suffix(),
        Suffix(branches=1, num_speculative_tokens=5, memory=64),
        Suffix(memory=0, max_ngram=1, min_confidence=0.0),
    ],
)
def test_it_keeps_the_contract(drafter: Suffix) -> None:
    check_drafter(drafter)


# -- what is drafted -------------------------------------------------------------------------------------


def test_drafts_what_followed_before() -> None:
    found = draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    assert (list(found.tokens[:4]), list(found.parents[:4])) == ([4, 5, 6, 7], [-1, 0, 1, 2])
    assert len(draft([1, 2, 3, 4])) == 0
    assert len(draft([7])) == 0


def test_drafts_what_followed_text_that_is_not_there_yet() -> None:
    drafter = Suffix(memory=0)
    sequence = Sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], SamplingParams(), Key(0), 100, frozenset())
    state = drafter.start(sequence, drafter.prepare(ToyTarget()))
    assert drafter.propose_after(state, (), 32) == drafter.draft(state)
    assert list(drafter.propose_after(state, [3, 4], 3).tokens) == [5, 6, 7]
    assert list(drafter.propose_after(state, [6], 2).tokens) == [7, 8]  # a match of one token
    assert not drafter.propose_after(state, [77], 8)


def test_the_most_frequent_comes_first() -> None:
    text = [1, 2, 50, 8, 1, 2, 60, 8, 1, 2, 60, 9, 1, 2]
    found = draft(text, min_confidence=0.05)
    assert found.tokens[0] == 60
    assert {(60,), (50,)} <= distinct_paths(found)
    # The share of 50 is a third of what the match is trusted with.
    assert (50,) not in distinct_paths(draft(text, min_confidence=0.3))


def test_a_longer_match_comes_before_a_more_frequent_one() -> None:
    text = [3, 60, 8, 3, 60, 9, 3, 60, 7, 1, 2, 3, 50, 8, 1, 2, 3]
    found = draft(text, min_confidence=0.0)
    assert found.tokens[0] == 50
    assert (60,) in distinct_paths(found)
    assert len(draft(text, min_confidence=0.0, max_spec_factor=1.0)) == 3, "as many as the longest match has"


def test_the_draft_is_as_long_as_the_match_deserves() -> None:
    weak = [9, *TEXT[:30], 7, 9]
    strong = [*TEXT[:40], 7, *TEXT[:10]]
    assert len(draft(weak, max_spec_factor=2.0, min_confidence=0.0)) == 2
    assert len(draft(strong, max_spec_factor=2.0, min_confidence=0.0)) == 20
    assert len(draft(strong, max_spec_factor=0.3, min_confidence=0.0)) == 3
    assert len(draft(strong, num_speculative_tokens=7, min_confidence=0.0)) == 7
    assert len(draft(strong, max_ngram=4, max_spec_factor=2.0, min_confidence=0.0)) == 8


def test_a_loop_goes_on_past_the_end_of_the_text() -> None:
    assert list(draft([1, 2, 1, 2, 1, 2], branches=1).tokens[:7]) == [1, 2, 1, 2, 1, 2, 1]
    assert list(draft([4, 4, 4], branches=1, min_confidence=0.0).tokens[:5]) == [4, 4, 4, 4, 4]


def test_nothing_after_a_token_that_ends_the_text() -> None:
    assert list(draft([1, 2, 3, 0, 5, 6, 1, 2], eos=frozenset([0])).tokens) == [3, 0]


def test_branches() -> None:
    text = [token for n in range(6) for token in (1, 2, 10 + n)] + [1, 2]
    for branches in (1, 3):
        found = draft(text, branches=branches, min_confidence=0.0)
        assert 0 < sum(parent < 0 for parent in found.parents) <= branches
    assert is_chain(draft(text, branches=1, min_confidence=0.0).parents)
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=2, ignore_eos=True)
    (generation,) = Engine(ToyTarget(), Suffix(branches=1), "rejection").generate([[1, 2, 1, 2]], params)
    assert generation.stats.accepted > 0


def test_a_budget_keeps_the_likeliest_nodes() -> None:
    drafter = Suffix()
    draw = random.Random(0)
    text = [draw.randrange(4) for _ in range(80)]
    sequence = Sequence(text, SamplingParams(), Key(0), limit=100)
    state = drafter.start(sequence, drafter.prepare(ToyTarget()))
    whole = drafter.draft(state)
    assert len(whole) > 9
    for budget in (1, 4, 9, 99):
        sequence.budget = budget
        found = drafter.draft(state)
        assert (found.tokens, found.parents, found.chances) == (
            whole.tokens[:budget],
            whole.parents[:budget],
            (whole.chances or ())[:budget],
        )


def test_a_copy_takes_few_steps() -> None:
    text = [random.Random(place).randrange(1000) for place in range(400)]
    run = Dictation(Suffix(), text, prompt=[*text, 1, 2], shared=Suffix().prepare(ToyTarget()))
    assert run.run() <= 22  # plain decoding: 400


# -- what is remembered ----------------------------------------------------------------------------------


def test_an_output_is_found_in_the_next_request() -> None:
    drafter = Suffix()
    memory = drafter.prepare(ToyTarget())
    assert Dictation(drafter, TEXT, prompt=[1, 2, 3], shared=memory).run() == len(TEXT)
    # The end of the prompt is enough to find the beginning.
    assert Dictation(drafter, TEXT, prompt=[7, 8, 3], shared=memory).run() <= 8
    assert Dictation(drafter, TEXT, prompt=[9], shared=memory).run() <= 9
    assert Dictation(drafter, TEXT, prompt=[9], shared=drafter.prepare(ToyTarget())).run() == len(TEXT)
    nothing = Suffix(memory=0)
    memory = nothing.prepare(ToyTarget())
    for _ in range(2):
        assert Dictation(nothing, TEXT, prompt=[9], shared=memory).run() == len(TEXT)


def test_an_output_that_ends_meanwhile_is_found() -> None:
    drafter = Suffix()
    memory = drafter.prepare(ToyTarget())
    later = Dictation(drafter, TEXT, prompt=[9], shared=memory)
    for _ in range(20):
        later.step()
    assert Dictation(drafter, TEXT, prompt=[8], shared=memory).run() == len(TEXT)
    assert later.run() <= 20 + 6


def test_steps_without_a_draft_are_followed() -> None:
    drafter = Suffix()
    memory = drafter.prepare(ToyTarget())
    Dictation(drafter, TEXT, shared=memory).run()
    run = Dictation(drafter, TEXT, prompt=[9], shared=memory)
    run.step()
    for _ in range(6):
        run.step(plain=True)
    run.step()
    assert list(run.drafts[-1].tokens[:4]) == TEXT[7:11]


def test_the_oldest_outputs_are_forgotten() -> None:
    drafter = Suffix(memory=640)
    memory = drafter.prepare(ToyTarget())
    for start in range(0, 2000, 50):
        Dictation(drafter, list(range(start, start + 50)), prompt=[9999], shared=memory).run()
        assert len(memory.shared) <= 640
    run = Dictation(drafter, list(range(1950, 2000)), prompt=[8888], shared=memory)
    assert run.run() <= 10
    assert len(run.state.cursors) <= 8
    assert Dictation(drafter, list(range(50)), prompt=[8888], shared=memory).run() == 50


def test_engines_do_not_share_their_memory() -> None:
    target, drafter = ToyTarget(), Suffix()
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    engine = Engine(target, drafter, adaptive=False)
    first, again = engine.generate([[3, 4]], params)[0], engine.generate([[3, 4]], params)[0]
    assert again.tokens == first.tokens
    assert again.stats.steps < first.stats.steps / 2
    (other,) = Engine(target, drafter, adaptive=False).generate([[3, 4]], params)
    assert other.stats.steps == first.stats.steps


# -- losslessness ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=60, ignore_eos=True),
        SamplingParams(max_new_tokens=60, temperature=1.0, seed=3, ignore_eos=True),
        SamplingParams(max_new_tokens=60, temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=4),
    ],
)
def test_tokens_are_those_of_plain_decoding(params: SamplingParams) -> None:
    """The tokens are also equal the second time, when the memory contains the texts."""
    target = ToyTarget()
    prompts = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6], [*range(8), *range(8)]]
    plain = Engine(target).generate(prompts, params)
    engine = Engine(target, Suffix(), adaptive=False)
    steps = []
    for _ in range(2):
        found = engine.generate(prompts, params)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert [g.finish_reason for g in found] == [g.finish_reason for g in plain]
        steps.append(sum(g.stats.steps for g in found))
    assert steps[1] < steps[0] / 2


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 0},
        {"max_spec_factor": 0},
        {"max_ngram": 0},
        {"branches": 0},
        {"min_confidence": -0.1},
        {"memory": 63},
    ],
)
def test_refuses_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(OutpaceError, match=next(iter(options))):
        Suffix(**options)  # type: ignore[arg-type]


def emit(drafter: Suffix, state: SuffixState, token: int) -> None:
    state.sequence.tokens.append(token)
    drafter.learn(state, Step(Draft(), (), [], [token], Logits(torch.empty(1, 32)), 0, state.sequence, {}))


def test_earlier_outputs_promise_too_and_are_trusted_apart() -> None:
    drafter = Suffix()
    shared = drafter.prepare(ToyTarget())
    words = list(range(1, 25))
    Dictation(drafter, words, prompt=[9], shared=shared).run()
    state = drafter.start(Sequence([30], SamplingParams(), Key(0), limit=100), shared)
    assert drafter.promise(state) == 0.0
    promises = []
    for token in words[:20]:
        emit(drafter, state, token)
        promises.append(drafter.promise(state))
    assert promises[0] == pytest.approx(1 / 3) and promises[6] == pytest.approx(7 / 9, abs=0.1)
    assert promises[-1] > 0.95 > 20 / 22
    own = Context(20, state.text, state.text.last)
    assert state.after.chance_after(own) == pytest.approx(
        20 / 22
    )  # nothing is known of matches in the text itself


def test_a_memory_that_grows_is_looked_up_again() -> None:
    drafter = Suffix()
    shared = drafter.prepare(ToyTarget())
    Dictation(drafter, list(range(40, 60)), prompt=[9], shared=shared).run()
    state = drafter.start(Sequence([30], SamplingParams(), Key(0), limit=100), shared)
    for token in range(1, 9):
        emit(drafter, state, token)
    assert drafter.promise(state) == 0.0 and state.cursors
    Dictation(drafter, list(range(1, 25)), prompt=[9], shared=shared).run()
    assert drafter.promise(state) == pytest.approx(8 / 10)
    assert list(drafter.draft(state).tokens[:3]) == [9, 10, 11]


def test_long_matches_that_go_on_are_trusted_more() -> None:
    drafter = Suffix()
    shared = drafter.prepare(ToyTarget())
    words = list(range(1, 25))
    sequence = Sequence([*words, 30, *words[:6]], SamplingParams(), Key(0), limit=100)
    state = drafter.start(sequence, shared)
    begun, first = drafter.promise(state), drafter.draft(state).chances
    assert begun == pytest.approx(6 / 8)

    for token in words[6:12]:
        emit(drafter, state, token)
    copied = drafter.promise(state)
    assert copied > 12 / 14
    fresh = drafter.start(sequence, shared)
    chances, unlearnt = drafter.draft(state).chances, drafter.draft(fresh).chances
    assert chances is not None and unlearnt is not None and first is not None
    assert sum(chances) > 1.1 * sum(unlearnt)
    emit(drafter, state, 29)
    assert drafter.promise(state) == 0.0  # no match
    for token in words[:12]:
        emit(drafter, state, token)
    assert 0 < drafter.promise(state) < copied  # one such match did not continue
