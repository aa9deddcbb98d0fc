"""The order of requests to methods: warm-up, turns, conversations, errors, interruptions."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest

from outpace.bench.items import Item, Suite
from outpace.bench.rows import rows_of
from outpace.bench.run import Measured, Settings, measure
from outpace.bench.runs import MethodRun, PromptBatch
from outpace.bench.subject import encode, fitting, spoken
from outpace.core import OutpaceError
from outpace.loading import Loaded
from unit.bench.told import Told


def suite(*items: Item) -> Suite:
    return Suite("some", items, "here")


def texts(count: int) -> Suite:
    return suite(*(Item(str(i), "all", ("a" * (i + 1),)) for i in range(count)))


def test_garbage_collections_leave_out_what_was_there_before(model: Loaded) -> None:
    frozen: list[int] = []

    def answer(prompt: list[int]) -> list[int]:
        frozen.append(gc.get_freeze_count())
        return [1, 2, 3, 4]

    def fail(prompt: list[int]) -> list[int]:
        raise ValueError

    gc.unfreeze()
    try:
        measure(model, [Told("none", [], answer)], texts(2), 1, Settings(max_new_tokens=4))
        warm_up, *timed = frozen
        assert not warm_up and all(count > 10_000 for count in timed)
        with pytest.raises(OutpaceError):
            measure(model, [Told("none", [], fail)], texts(1), 1, Settings(max_new_tokens=4))
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()
    measure(model, [Told("none", [], answer)], texts(1), 1, Settings(max_new_tokens=4))
    assert gc.get_freeze_count() > 10_000  # what a process freezes stays so


def test_methods_take_turns_and_each_begins_in_turn(model: Loaded) -> None:
    log: list[tuple[str, PromptBatch]] = []
    methods = [Told(name, log) for name in ("none", "a", "b")]
    found = measure(model, methods, texts(4), 1, Settings(max_new_tokens=4, repeats=2))
    assert [name for name, _ in log[:3]] == ["none", "a", "b"]  # the warm-up
    rounds = rounds_of(log, 3)
    assert len(rounds) == 8 and all(sorted(one) == ["a", "b", "none"] for one in rounds)
    # All three are asked the very same at each prompt.
    for start in range(3, len(log), 3):
        assert log[start][1] == log[start + 1][1] == log[start + 2][1]
    # The suite begins before the warm-up, its repeats after it.
    assert [method.begun for method in methods] == [[True, False, False]] * 3
    for trace in found.traces:
        assert [len(group) for group in trace.runs] == [2, 2, 2, 2]


def rounds_of(log: list[tuple[str, PromptBatch]], methods: int) -> list[tuple[str, ...]]:
    """The order of the methods at each prompt, after the warm-up."""
    order = [name for name, _ in log[methods:]]
    return [tuple(order[start : start + methods]) for start in range(0, len(order), methods)]


def test_the_order_is_drawn_anew_and_again_with_the_same_seed(model: Loaded) -> None:
    prompts = texts(24)

    def drawn(items: Suite = prompts, batch: int = 1, **settings: Any) -> list[tuple[str, ...]]:
        log: list[tuple[str, PromptBatch]] = []
        methods = [Told(name, log) for name in ("none", "a", "b", "c")]
        measure(model, methods, items, batch, Settings(max_new_tokens=4, **settings))
        return rounds_of(log, 4)

    rounds = drawn()
    # Each is first equally often, in any part of the run, and has had all others before it.
    for start in range(0, 24, 4):
        assert {one[0] for one in rounds[start : start + 4]} == {"none", "a", "b", "c"}
    before = {pair for one in rounds for pair in pairwise(one)}
    assert len(before) == 4 * 3
    assert drawn() == rounds != drawn(seed=1)
    assert drawn(batch=2) != rounds[:12]
    assert drawn(suite(*prompts.items[1:])) != rounds[:23]  # another part of the suite
    assert drawn(repeats=2)[24:] != rounds


def test_who_has_left_is_not_asked_any_more(model: Loaded) -> None:
    log: list[tuple[str, PromptBatch]] = []

    def advanced(measured: Measured) -> None:
        measured.traces[1].left = len(measured.groups) >= 2

    methods = [Told(name, log) for name in ("none", "a", "b")]
    found = measure(model, methods, texts(4), 1, Settings(max_new_tokens=4), advanced)
    assert [len(trace.runs) for trace in found.traces] == [4, 2, 4]
    assert sum(name == "a" for name, _ in log) == 1 + 2
    rows = rows_of(found, lambda asked, output: 0.0)
    assert [row.prompts for row in rows] == [4, 2, 4] and [row.outputs for row in rows] == [4, 2, 4]
    assert rows[1].speed is not None and rows[1].speed.groups == 2 and len(rows[1].samples) == 2


def test_a_conversation_goes_on_from_plain_decodings_answer_for_all(model: Loaded) -> None:
    log: list[tuple[str, PromptBatch]] = []
    plain = Told("none", log, lambda prompt: model.tokens("yes"))
    other = Told("a", log, lambda prompt: model.tokens("no"))
    talk = Item("1", "all", ("first", "second"), chat=True)
    found = measure(model, [plain, other], suite(talk), 1, Settings(max_new_tokens=4))
    expected = "User: first\nAssistant: yes\nUser: second\nAssistant:"
    assert [model.tokenizer.decode(r.prompts[0]) for _, r in log[-2:]] == [expected] * 2
    assert found.prompts[0][1] == [model.tokens(expected)]
    assert [len(turns) for turns in found.traces[1].runs[0]] == [2]


def test_batches_and_who_takes_part_in_a_turn(model: Loaded) -> None:
    log: list[tuple[str, PromptBatch]] = []
    items = [Item(str(i), "all", ("x",) * (1 + i % 2), chat=True) for i in range(5)]
    found = measure(model, [Told("none", log)], suite(*items), 2, Settings(max_new_tokens=4, seed=7))
    assert [len(r.prompts) for _, r in log[1:]] == [2, 1, 2, 1, 1]
    assert [len(group) for group in found.groups] == [2, 2, 1]
    assert [item.id for item in found.taking_part(0, 1)] == ["1"]
    assert [r.seeds for _, r in log[1:]] == [[7, 8], [7], [9, 10], [9], [11]]


def test_an_error_fails_the_row_and_no_other(model: Loaded) -> None:
    log: list[tuple[str, PromptBatch]] = []

    class Fails(Told):
        def run(self, request: PromptBatch) -> MethodRun:
            if sum(name == self.name for name, _ in self._log) == 2:
                raise ValueError("it broke\nsomewhere")
            return super().run(request)

    methods = [Told("none", log), Fails("a", log), Told("b", log)]
    found = measure(model, methods, texts(4), 1, Settings(max_new_tokens=4))
    assert found.traces[1].error == "ValueError: it broke"
    assert sum(name == "a" for name, _ in log) == 2
    assert found.traces[2].error is None and len(found.traces[2].runs) == 4


def test_plain_decoding_must_not_fail(model: Loaded) -> None:
    def fail(prompt: list[int]) -> list[int]:
        raise ValueError("it broke")

    with pytest.raises(OutpaceError, match="plain decoding failed: ValueError: it broke"):
        measure(model, [Told("none", [], fail)], texts(1), 1, Settings(max_new_tokens=4))

    def full(prompt: list[int]) -> list[int]:
        raise MemoryError

    with pytest.raises(OutpaceError, match="plain decoding failed: out of memory; a smaller --batch"):
        measure(model, [Told("none", [], full)], texts(1), 1, Settings(max_new_tokens=4))
    found = measure(model, [Told("none", []), Told("a", [], full)], texts(1), 1, Settings(max_new_tokens=4))
    assert found.traces[1].error == "out of memory; a smaller --batch or --max-new-tokens needs less"


@pytest.mark.parametrize("after", [0, 1, 4, 9, 10])
def test_only_whole_groups_count_when_stopped(model: Loaded, after: int) -> None:
    log: list[tuple[str, PromptBatch]] = []
    methods = [Told(name, log) for name in ("none", "a")]
    found = measure(
        model, methods, texts(4), 1, Settings(max_new_tokens=4), stopped=lambda: len(log) >= after
    )
    assert len(log) == after
    whole = max(0, after - 2) // 2
    assert len(found.groups) == len(found.prompts) == min(whole, 4)
    assert all(len(trace.runs) == whole for trace in found.traces)


def test_ends_by_option_or_by_suite(model: Loaded) -> None:
    def asked(items: Suite, **settings: Any) -> bool:
        log: list[tuple[str, PromptBatch]] = []
        measure(model, [Told("none", log)], items, 1, Settings(max_new_tokens=4, **settings))
        return log[0][1].ends

    assert not asked(texts(1))
    assert asked(texts(1), ends=True)
    assert asked(suite(Item("1", "all", ("x",), ends=True)))


def test_how_prompts_become_tokens(model: Loaded, chat_model: Loaded) -> None:
    talk = Item("1", "all", ("a", "b"), chat=True)
    answer = [*model.tokens(" yes "), *model.target.eos_token_ids, *model.tokens("junk")]
    assert spoken(model, answer) == "yes"
    decode = chat_model.tokenizer.decode
    assert decode(encode(chat_model, talk)) == "[user]a[assistant]"
    assert decode(encode(chat_model, talk, [answer])) == "[user]a[assistant]yes[user]b[assistant]"
    assert decode(encode(model, talk, [answer])) == "User: a\nAssistant: yes\nUser: b\nAssistant:"
    assert encode(model, Item("1", "all", ("abc",))) == model.tokens("abc")
    assert encode(model, Item("1", "all", tokens=(5, 6))) == [5, 6]


def test_prompts_that_do_not_fit_are_counted(model: Loaded) -> None:
    context = model.target.context
    assert context is not None
    exact, long = Item("1", "all", ("a" * (context - 8),)), Item("2", "all", ("a" * (context - 7),))
    found = fitting(model, suite(exact, long), 8)
    assert found.items == (exact,) and found.left_out == 1
    with pytest.raises(OutpaceError, match="no prompt of some fits the model's context"):
        fitting(model, suite(long), 8)
    # Two answers need room for both.
    talk = Item("3", "all", ("a" * 20, "b" * 20), chat=True)
    taken = len(encode(model, talk, [()]))
    assert fitting(model, suite(talk), (context - taken) // 2).items == (talk,)
    with pytest.raises(OutpaceError, match="no prompt"):
        fitting(model, suite(talk), (context - taken) // 2 + 1)
    with pytest.raises(OutpaceError, match="prompt 4: it has token ids outside"):
        fitting(model, suite(Item("4", "all", tokens=(10**6,))), 8)
