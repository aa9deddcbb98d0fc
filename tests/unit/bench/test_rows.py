"""Every figure of a row, from measurements made up so that it can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outpace.bench.items import Item, Suite
from outpace.bench.rows import Row, rows_of
from outpace.bench.run import Measured, MethodRuns, Settings
from outpace.bench.runs import MethodRun
from unit.bench.told import Told

ITEMS = (Item("p", "x", ("one",)), Item("q", "x", ("two",)), Item("r", "y", ("three",)))


def run(output: list[int], seconds: float, first: float = 0.5, **more: object) -> MethodRun:
    given = MethodRun([output], seconds, first, 1, len(output), len(output), 0, 0, [], 0.0, 0.0)
    return replace(given, **more)


def measured(
    plain: list[list[list[MethodRun]]], other: list[list[list[MethodRun]]], settings: Settings | None = None
) -> Measured:
    groups = [(item,) for item in ITEMS[: len(plain)]]
    return Measured(
        Suite("s", ITEMS, "here"),
        1,
        settings or Settings(4),
        groups,
        [[[[9] * 10]] for _ in groups],
        [MethodRuns(Told("none", []), plain), MethodRuns(Told("a", []), other)],
    )


def rows(found: Measured) -> list[Row]:
    return rows_of(found, lambda asked, output: float(len(asked) + len(output)))


TOKENS = [1, 2, 3, 4]


def test_speed() -> None:
    plain = [[[run(TOKENS, 4.5)]], [[run(TOKENS, 8.5)]], [[run(TOKENS, 2.5)]]]
    other = [[[run(TOKENS, 2.5)]], [[run(TOKENS, 8.5)]], [[run(TOKENS, 1.0)]]]
    none, row = rows(measured(plain, other))
    assert none.speed is not None and row.speed is not None
    assert none.speed.speedup == none.speed.speedup_total == 1
    assert none.speed.tokens_per_second == pytest.approx(12 / 15.5)
    assert row.speed.tokens_per_second == pytest.approx(12 / 12)
    assert row.speed.quartiles == pytest.approx(((4 / 8.5 + 4 / 2.5) / 2, 4 / 2.5, (4 / 2.5 + 4) / 2))
    assert row.speed.speedup == pytest.approx(4.5 / 2.5)  # the median of 1.8, 1 and 2.5
    assert row.speed.speedup_total == pytest.approx(15.5 / 12)
    # Without the first step: 3 tokens in 2, 8 and 0.5 seconds, plainly in 4, 8 and 2.
    assert row.speed.decode_speedup == pytest.approx(2)
    assert row.speed.decode_tokens_per_second == pytest.approx(9 / 10.5)
    assert row.speed.prefill_seconds == 0.5
    assert {name: speed.speedup for name, speed in row.categories.items()} == {
        "x": pytest.approx((1.8 + 1) / 2),
        "y": pytest.approx(2.5),
    }
    assert row.categories["x"].prompts == 2


def test_tokens_per_step_by_category() -> None:
    plain = [[[run(TOKENS, 4.0, steps=4)]] for _ in range(3)]
    other = [[[run(TOKENS, 4.0, steps=steps)]] for steps in (1, 2, 3)]
    none, row = rows(measured(plain, other))
    assert none.tau == 1 and row.tau == 2
    assert {name: speed.tau for name, speed in row.categories.items()} == {"x": 8 / 3, "y": 4 / 3}
    other[2][0][0] = run(TOKENS, 4.0, steps=None)
    row = rows(measured(plain, other))[1]
    assert row.tau is None
    assert {name: speed.tau for name, speed in row.categories.items()} == {"x": 8 / 3, "y": None}


@pytest.mark.parametrize("count", [1, 5, 6, 9])
def test_the_interval_is_of_groups_and_there_must_be_a_few(count: int) -> None:
    both = {"outputs": [TOKENS, TOKENS]}
    plain = [[[run(TOKENS, 3.0, **both)]]] * count
    other = [[[run(TOKENS, 1.0 + place % 2, **both)]] for place in range(count)]
    found = measured(plain[:1], other[:1])
    found.traces[0].runs, found.traces[1].runs = plain, other
    found.groups = [(ITEMS[0], ITEMS[1])] * count
    found.prompts = [[[[9], [9]]]] * count
    none, row = rows(found)
    assert none.speed is not None and row.speed is not None
    assert (row.speed.prompts, row.speed.groups) == (2 * count, count)
    if count < 6:
        assert none.speed.interval is row.speed.interval is None
    else:
        assert none.speed.interval == (1, 1)
        assert row.speed.interval is not None and row.speed.interval == pytest.approx((1.5, 3.0))


def test_of_repeats_the_median_counts_and_pairs_are_of_one_repeat() -> None:
    plain = [[[run(TOKENS, 1.0)], [run(TOKENS, 10.0)], [run(TOKENS, 2.0)]]]
    other = [[[run(TOKENS, 0.6)], [run(TOKENS, 10.0)], [run(TOKENS, 4.0)]]]
    _, row = rows(measured(plain, other))
    assert row.speed is not None
    assert row.speed.tokens_per_second == pytest.approx(4 / 4.0)
    assert row.speed.speedup == pytest.approx(1.0)  # of 1.67, 1 and 0.5
    assert (row.tokens, row.outputs, row.steps) == (12, 3, 12)


def test_turns_of_a_conversation_count_together() -> None:
    plain = [[[run(TOKENS, 1.0), run(TOKENS, 3.0)]]]
    other = [[[run(TOKENS, 1.0), run(TOKENS, 1.0)]]]
    found = measured(plain, other)
    found.prompts[0].append([[9]])
    found.groups[0] = (Item("p", "x", ("one", "two"), chat=True),)
    _, row = rows(found)
    assert row.speed is not None and row.speed.speedup == pytest.approx(2)
    assert row.outputs == 2 and row.prompts == 1


def test_steps_and_their_milliseconds() -> None:
    more = {"steps": 2, "forwards": 3, "drafted": 8, "accepted": 2, "accepted_at": [2, 0]}
    times = {"draft_seconds": 0.2, "verify_seconds": 0.6}
    plain = [[[run(TOKENS, 4.5)]]]
    _, row = rows(measured(plain, [[[run(TOKENS, 1.5, **more, **times)]]]))
    assert row.tau == 2 and row.acceptance_rate == 0.25
    assert row.acceptance_by_position == [1.0, 0.0]
    each = row.milliseconds_per_step
    assert each is not None
    assert (each.total, each.draft, each.verify, each.rest) == pytest.approx((500, 100, 300, 100))


def test_what_is_not_known_stays_unknown() -> None:
    unknown = dict.fromkeys(("steps", "drafted", "accepted", "forwards", "draft_seconds", "verify_seconds"))
    _, row = rows(measured([[[run(TOKENS, 4.5)]]], [[[run(TOKENS, 1.5, **unknown)]]]))
    assert row.steps is row.tau is row.acceptance_rate is row.milliseconds_per_step is None
    assert row.speed is not None and row.speed.speedup == 3 and row.equal


def test_an_answer_that_came_whole_has_no_decode_speed() -> None:
    whole = run(TOKENS, 1.0, 1.0, first_tokens=4)
    plain = [[[run(TOKENS, 4.5)]], [[run(TOKENS, 4.5)]]]
    _, row = rows(measured(plain, [[[whole]], [[run(TOKENS, 2.5)]]]))
    assert row.speed is not None and row.speed.decode_speedup == 2
    _, row = rows(measured(plain, [[[whole]], [[whole]]]))
    assert row.speed is not None and row.speed.decode_speedup is row.speed.decode_tokens_per_second is None
    # A clock that did not move in between.
    _, row = rows(measured(plain, [[[run(TOKENS, 1.0, 1.0)]], [[run(TOKENS, 2.5)]]]))
    assert row.speed is not None and row.speed.decode_speedup == 2


def test_differences_of_every_repeat_with_their_margins() -> None:
    plain = [[[run(TOKENS, 1)], [run(TOKENS, 1)]], [[run(TOKENS, 1)], [run(TOKENS, 1)]]]
    other = [
        [[run(TOKENS, 1)], [run([1, 2, 7, 4], 1)]],
        [[run([1], 1)], [run([*TOKENS, 5], 1)]],
    ]
    none, row = rows(measured(plain, other))
    assert none.equal and none.different == 0
    assert not row.equal and row.different == 3 and row.outputs == 4
    told = [(d.item, d.index, d.plain, d.other, d.margin) for d in row.differences]
    # The margin is that after the prompt's ten tokens and those before; none where plain decoding has ended.
    assert told == [("p", 2, 3, 7, 12.0), ("q", 1, 2, None, 11.0), ("q", 4, None, 5, None)]
    _, row = rows(measured(plain, other, Settings(4, temperature=1.0)))
    assert [d.margin for d in row.differences] == [None] * 3


def test_a_failed_row_has_no_figures() -> None:
    found = measured([[[run(TOKENS, 1)]]], [])
    found.traces[1].error = "it broke"
    row = rows(found)[1]
    assert row.error == "it broke" and row.speed is None and row.tokens == 0 and not row.equal


def test_categories_only_where_none_were_decoded_together() -> None:
    together = run(TOKENS, 1)
    together = replace(together, outputs=[TOKENS, TOKENS])
    found = measured([[[together]]], [[[together]]])
    found.groups = [(ITEMS[0], ITEMS[2])]
    found.prompts = [[[[1], [2]]]]
    assert rows(found)[1].categories == {}
    found.groups = [(ITEMS[0], ITEMS[1])]
    assert list(rows(found)[1].categories) == ["x"]
