"""Copying from references: the start, resynchronisation after an edit, and unchanged tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dictation import Dictation
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.copying.reference import Reference
from outpace.drafters.none import NoDraft
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import is_chain

TEXT = list(range(200, 260))  # no token twice: an n-gram says where one is


def dictate(text: list[int], *references: list[int], eos: int | None = None, **options: int) -> Dictation:
    drafter = Reference(**options)  # type: ignore[arg-type]
    return Dictation(drafter, text, references=references, eos=eos)


@pytest.mark.parametrize(
    "drafter",
    [
        Reference(),
        Reference(branches=1),
        Reference(num_speculative_tokens=3, max_speculative_tokens=5, max_ngram=1, branches=5),
        Reference(prompt=False),
    ],
)
def test_it_keeps_the_contract(drafter: Reference) -> None:
    check_drafter(drafter)


# -- copying ---------------------------------------------------------------------------------------------


def test_the_first_draft_is_the_beginning_of_the_first_reference() -> None:
    run = dictate(TEXT, TEXT, [7, 8, 9], num_speculative_tokens=5)
    run.step()
    assert (list(run.drafts[0].tokens), list(run.drafts[0].parents)) == (TEXT[:5], [-1, 0, 1, 2, 3])


def test_a_copy_takes_few_steps_and_the_draft_grows() -> None:
    text = [random.Random(place).randrange(1000) for place in range(600)]
    run = dictate(text, text, num_speculative_tokens=8, max_speculative_tokens=128)
    assert run.run() == 8
    assert [len(draft) for draft in run.drafts[:7]] == [8, 16, 32, 64, 128, 128, 128]


def test_the_draft_is_short_again_after_an_edit() -> None:
    text = [*TEXT[:40], 1, *TEXT[40:]]
    run = dictate(text, TEXT, num_speculative_tokens=4, max_speculative_tokens=16)
    run.run()
    lengths = [len(draft) for draft in run.drafts]
    edit = next(i for i, tokens in enumerate(run.emitted) if 1 in tokens)
    assert lengths[edit] == 16
    assert all(length <= 4 for length in lengths[edit + 1 : edit + 3])
    assert max(lengths[edit + 3 :]) > 4


@pytest.mark.parametrize(("first", "length"), [([], 16), ([1], 6)])
def test_what_was_not_verified_counts_as_copied_where_it_is_right(first: list[int], length: int) -> None:
    run = dictate([*first, *TEXT], TEXT, num_speculative_tokens=8)
    run.step(nodes=0)
    assert run.state.length == length


def test_the_end_of_a_reference_is_the_end_of_the_output() -> None:
    run = dictate([*TEXT[:6], 0], TEXT[:6], eos=0)
    assert run.run() == 1
    assert run.sequence.finish_reason == "eos"
    # Nothing is drafted after a token that ends the text.
    run = dictate(TEXT[:6], [*TEXT[:3], 0, *TEXT[3:]], eos=0)
    run.step()
    assert list(run.drafts[0].tokens) == [*TEXT[:3], 0]


# -- coming back -----------------------------------------------------------------------------------------


def inserted(text: list[int]) -> list[int]:
    return [*text[:30], 1, *text[30:]]


def deleted(text: list[int]) -> list[int]:
    return [*text[:30], *text[31:]]


def replaced(text: list[int]) -> list[int]:
    return [*text[:30], 1, *text[31:]]


def replaced_by_fewer(text: list[int]) -> list[int]:
    return [*text[:30], 1, *text[33:]]


def replaced_by_more(text: list[int]) -> list[int]:
    return [*text[:30], 1, 2, 3, *text[31:]]


def several_deleted(text: list[int]) -> list[int]:
    return [*text[:30], *text[42:]]


def many_inserted(text: list[int]) -> list[int]:
    return [*text[:30], *range(1, 21), *text[30:]]


@pytest.mark.parametrize(
    ("edit", "lost"),
    [
        # Steps in which nothing is copied, besides the one with the edit itself.
        (replaced, 0),
        (replaced_by_fewer, 0),
        (deleted, 0),
        (several_deleted, 0),
        (inserted, 1),
        (replaced_by_more, 3),
        (many_inserted, 20),
    ],
)
def test_it_comes_back_after_an_edit(edit: Callable[[list[int]], list[int]], lost: int) -> None:
    text = edit(TEXT)
    run = dictate(text, TEXT, branches=5)
    run.run()
    alone = [tokens for tokens in run.emitted if len(tokens) == 1]
    assert len(alone) <= lost
    assert run.emitted[-1][-1] == TEXT[-1]
    # Copied before and after: of the reference's tokens almost none was said without having been drafted.
    assert len(run.emitted) <= 2 + len(alone) + 4


def test_an_error_in_every_tenth_token() -> None:
    rng = random.Random(0)
    right = [rng.randrange(300) for _ in range(200)]
    wrong = list(right)
    for place in range(9, 200, 10):
        wrong[place : place + 1] = [rng.randrange(300, 400) for _ in range(rng.choice([1, 2]))]
    # Plain decoding takes 200 steps; with twenty errors none can do with fewer than 21.
    assert dictate(right, wrong).run() <= 45


def test_the_nearest_place_is_preferred() -> None:
    phrase = [5, 6]
    text = [*TEXT[:10], *phrase, *TEXT[10:20], *phrase, *TEXT[20:30], *phrase, *TEXT[30:40]]
    start = text.index(215)
    # After an edit before the second occurrence of the phrase, what follows is what follows there.
    said = [*text[:start], 1, 1, 1, *text[start + 3 :]]
    run = dictate(said, text, max_ngram=2, num_speculative_tokens=4, max_speculative_tokens=4)
    while run.sequence.output_length < start + 3 + 2:
        run.step()
    copied = [token for draft in run.drafts[-3:] for token in draft.tokens]
    assert 220 in copied or 218 in copied
    assert not {210, 230} & set(copied)
    # Where the edit is too long to guess its end, the phrase alone tells the place.
    said = [*text[:start], *range(300, 312), *phrase, *text[text.index(220) :]]
    run = dictate(said, text, max_ngram=2, num_speculative_tokens=4, max_speculative_tokens=4)
    while run.sequence.output_length < start + 12 + 4:
        run.step()
    copied = [token for draft in run.drafts for token in draft.tokens]
    assert 220 in copied and not {210, 230} & set(copied[copied.index(215) :])
    # The longest match counts more than the nearest place.
    run = dictate(
        [5, 6, 8, 9],
        [5, 1, 6, 2, 3, 4, 5, 6, 8, 9],
        max_ngram=2,
        num_speculative_tokens=1,
        max_speculative_tokens=1,
    )
    run.run()
    assert [list(draft.tokens) for draft in run.drafts] == [[5], [8]]


def test_a_lone_token_far_away_is_not_taken_for_the_place() -> None:
    comma = 3
    text = [*TEXT[:10], *TEXT[10:50], comma, 4, 5, *TEXT[50:]]
    said = [*TEXT[:10], comma, 4, *TEXT[10:]]
    run = dictate(said, text, num_speculative_tokens=6, max_speculative_tokens=6)
    while run.sequence.output_length < 14:
        run.step()
    assert run.state.trails[0].place <= 20
    run.run()
    assert len(run.emitted) <= 16


def test_steps_without_a_draft_are_followed() -> None:
    run = dictate(TEXT, TEXT, num_speculative_tokens=5)
    run.step()
    for _ in range(7):
        run.step(plain=True)
    run.step()
    assert list(run.drafts[-1].tokens)[:5] == TEXT[13:18]


# -- several references ----------------------------------------------------------------------------------


def test_references_are_merged_where_they_agree() -> None:
    first, second = [1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 40, 50]
    run = dictate([1, 2, 3, 40, 50, 7], first, second, num_speculative_tokens=2, max_speculative_tokens=8)
    assert run.step() == [1, 2, 3]
    run.step()
    tree = run.drafts[1]
    assert sorted(zip(tree.tokens, tree.parents, strict=True)) == [(4, -1), (5, 0), (40, -1), (50, 1)]
    assert run.emitted[1] == [40, 50, 7]


def test_the_output_may_change_from_one_reference_to_another() -> None:
    one, other = TEXT[:25], TEXT[35:]
    assert dictate([*one, *other], one, other).run() <= 5
    assert dictate([*other, *one], one, other).run() <= 6


def test_branches_limit_the_tree() -> None:
    texts = [[1, 2, 3, 100 + n, 200 + n] for n in range(6)]
    for branches in (1, 2, 4):
        run = dictate(
            [1, 2, 3, 50],
            *texts,
            branches=branches,
            max_ngram=2,
            num_speculative_tokens=2,
            max_speculative_tokens=2,
        )
        run.step()
        run.step()
        assert sum(parent < 0 for parent in run.drafts[1].parents) <= branches
        assert branches > 1 or all(is_chain(draft.parents) for draft in run.drafts)


# -- where references come from --------------------------------------------------------------------------


def test_without_references_the_prompt_is_one() -> None:
    document = TEXT[:20]
    run = Dictation(Reference(), text=document[5:], prompt=[*document, 1, 2])
    assert run.run() <= 3
    run = Dictation(Reference(prompt=False), text=document[5:], prompt=[*document, 1, 2])
    assert run.run() == 15
    # References of the request are read instead.
    run = Dictation(Reference(), text=document[5:], prompt=[*document, 1, 2], references=[[7, 7]])
    assert run.run() == 15


def test_decoding_that_goes_on_is_found_in_the_reference() -> None:
    target, params = ToyTarget(), SamplingParams(max_new_tokens=40, ignore_eos=True)
    (plain,) = Engine(target).generate([[3, 9, 2]], params)
    engine = Engine(target, Reference(), adaptive=False)
    sequence = engine.add([3, 9, 2], params, references=[plain.tokens], output=plain.tokens[:20])
    while engine.sequences:
        engine.step()
    assert sequence.output == plain.tokens
    assert sequence.stats.steps <= 4


def test_only_this_drafter_takes_references() -> None:
    for drafter in (NoDraft(), PromptLookup()):
        engine = Engine(ToyTarget(), drafter, adaptive=False)
        with pytest.raises(OutpaceError, match="drafter='reference'"):
            engine.add([1, 2], references=[[3, 4]])
        with pytest.raises(OutpaceError, match="drafter='reference'"):
            engine.generate([[1, 2]], references=[[[3, 4]]])
        assert len(engine.generate([[1, 2]], SamplingParams(max_new_tokens=2), references=[[]])) == 1


@pytest.mark.parametrize(
    "options",
    [{"num_speculative_tokens": 0}, {"max_speculative_tokens": 8}, {"max_ngram": 0}, {"branches": 0}],
)
def test_refuses_options_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(OutpaceError, match=next(iter(options))):
        Reference(**options)  # type: ignore[arg-type]


# -- losslessness ----------------------------------------------------------------------------------------

SAMPLINGS = [
    SamplingParams(max_new_tokens=60, ignore_eos=True),
    SamplingParams(max_new_tokens=60, temperature=1.0, seed=3, ignore_eos=True),
    SamplingParams(max_new_tokens=60, temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=4),
]


@pytest.mark.parametrize("params", SAMPLINGS)
@pytest.mark.parametrize(
    "options",
    [{}, {"branches": 1}, {"num_speculative_tokens": 5, "max_speculative_tokens": 9, "branches": 5}],
)
def test_tokens_are_those_of_plain_decoding(params: SamplingParams, options: dict[str, int]) -> None:
    """References contain the output with errors, and each request has its own."""
    target, rng = ToyTarget(), random.Random(1)
    prompts = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6], [*range(8), *range(8)]]
    plain = Engine(target).generate(prompts, params)
    references = []
    for generation in plain:
        text = list(generation.tokens)
        for place in range(7, len(text), 11):
            text[place : place + rng.randrange(3)] = [rng.randrange(1, 32) for _ in range(rng.randrange(3))]
        references.append([text, [rng.randrange(32) for _ in range(50)]])
    engine = Engine(target, Reference(**options), adaptive=False)  # type: ignore[arg-type]
    found = engine.generate(prompts, params, references)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert [g.finish_reason for g in found] == [g.finish_reason for g in plain]
    steps, tokens = sum(g.stats.steps for g in found), sum(g.stats.tokens for g in found)
    assert steps < tokens / 2


def test_the_whole_output_as_reference() -> None:
    target, params = ToyTarget(), SamplingParams(max_new_tokens=100, temperature=1.0, seed=2, ignore_eos=True)
    (plain,) = Engine(target).generate([[5, 6]], params)
    (found,) = Engine(target, Reference(), adaptive=False).generate([[5, 6]], params, [[plain.tokens]])
    assert found.tokens == plain.tokens
    assert plain.stats.steps == 100
    assert found.stats.steps <= 4
    (found,) = Engine(target, Reference(branches=1), "rejection").generate([[5, 6]], params, [[plain.tokens]])
    assert found.stats.accepted > 0
