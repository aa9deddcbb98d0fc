"""Tuning with methods whose seconds are made up: what is chosen, what is expected, what time it takes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.bench.items import Item, Suite
from outpace.bench.run import Settings
from outpace.bench.runs import MethodRun, PromptBatch
from outpace.core import OutpaceError, Promise
from outpace.drafters import load_drafter
from outpace_lab.bench import tuning
from outpace_lab.bench.candidates import COSTLIEST, Candidate, affordable, candidates
from outpace_lab.bench.tuning import Goal, Way, tune, verify
from parts import first

SETTINGS = Settings(max_new_tokens=10)
RECORDED = Path(__file__).parent / "halving_costs.json"
SUBJECT: Any = SimpleNamespace(
    target=SimpleNamespace(context=None, eos_token_ids=frozenset()), dtype="float32"
)
SPECS = [
    "jacobi:num_speculative_tokens=2",
    "lookahead:window=2,ngram=3,guesses=2",
    "prompt_lookup:num_speculative_tokens=4",
]


def suite(count: int) -> Suite:
    return Suite("made up", tuple(Item(str(i), "all", tokens=(i + 1,)) for i in range(count)), "here")


class Clock:
    """Moves when something is decoded."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def made_up(
    monkeypatch: pytest.MonkeyPatch,
    speeds: dict[str, float] | Callable[[str, PromptBatch], tuple[float, list[float]]],
    clock: Clock | None = None,
    broken: str = "",
    wrong: str = "",
    width_seconds: float = 0.0,
) -> list[tuple[str, int]]:
    """Methods with these tokens per second; returns the list of requests, by method and number of prompts."""
    asked: list[tuple[str, int]] = []

    class Fake:
        peer = lossy = lone = adaptive = False
        promised = True
        verifier = "match"

        def __init__(self, subject: Any, spec: str, temperature: float) -> None:
            self.name = spec

        def begin(self, anew: bool = False) -> None:
            pass

        def run(self, request: PromptBatch) -> MethodRun:
            asked.append((self.name, len(request.prompts)))
            if self.name == broken:
                raise RuntimeError("no such kernel")
            tokens = 10 * len(request.prompts)
            if callable(speeds):
                seconds, last = speeds(self.name, request)
            else:
                seconds = tokens / speeds[self.name]
                last = [seconds] * len(request.prompts)
            if clock is not None:
                clock.now += seconds
            outputs = [[int(self.name == wrong), *range(9)] for _ in request.prompts]
            steps = 10 if self.name == "none" else 5
            return MethodRun(outputs, seconds, 0.0, 0, steps=steps * len(outputs), last_seconds=last)

    def widths_of(
        target: Any, context: int, widths: tuple[int, ...], batch: int, before: Callable[[], None]
    ) -> list[float]:
        for _ in widths:
            before()
            if clock is not None:
                clock.now += width_seconds
        return [0.001 * width for width in widths]

    monkeypatch.setattr(tuning, "Frugal", Fake)
    monkeypatch.setattr(tuning, "measure_widths", widths_of)
    return asked


ONE = {"none": 10.0, SPECS[0]: 8.0, SPECS[1]: 15.0, SPECS[2]: 12.0}


def test_the_fastest_is_chosen_and_what_to_expect_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, ONE)
    found = tune(SUBJECT, SPECS, suite(40), Goal(), SETTINGS, 1000.0)
    assert found is not None and found.way == Way(SPECS[1], 1)
    row, speed = found.row, found.row.speed
    assert speed is not None and speed.tokens_per_second == pytest.approx(15.0)
    assert speed.speedup == pytest.approx(1.5) and speed.interval == pytest.approx((1.5, 1.5))
    assert row.tau == 2.0 and row.equal and row.outputs == row.prompts == 40
    prompts = {way.spec: one.prompts for way, one in found.rows.items()}
    # As many candidates stay as there are times the prompts decoded so far.
    assert prompts == {"none": 40, SPECS[0]: 20, SPECS[1]: 40, SPECS[2]: 40}
    assert found.steps[1][1] == 0.001 and found.left_out == []
    assert {way.spec: one.tau for way, one in found.rows.items()} == {
        "none": 1.0,
        **dict.fromkeys(SPECS, 2.0),
    }


def test_what_is_too_wide_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 4 rows takes four plain ones here, one of 8 rows eight."""
    speeds = dict.fromkeys(
        [
            "none",
            "jacobi",
            "jacobi:num_speculative_tokens=4",
            "jacobi:num_speculative_tokens=8",
            "jacobi:num_speculative_tokens=16",
        ],
        10.0,
    )
    asked = made_up(monkeypatch, speeds)
    found = tune(SUBJECT, ["jacobi"], suite(10), Goal(), SETTINGS, 1000.0)
    assert found is not None
    assert found.left_out == [
        Way("jacobi:num_speculative_tokens=8", 1),
        Way("jacobi:num_speculative_tokens=16", 1),
    ]
    assert {name for name, _ in asked} == {"none", "jacobi", "jacobi:num_speculative_tokens=4"}


def test_plain_decoding_may_be_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, {**ONE, "none": 100.0})
    found = tune(SUBJECT, SPECS, suite(10), Goal(), SETTINGS, 1000.0)
    assert found is not None and found.way.spec == "none"
    assert found.row.speed is not None and found.row.speed.speedup == 1.0


def test_outputs_that_are_not_plain_decodings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, ONE, wrong=SPECS[1])
    found = tune(SUBJECT, SPECS, suite(10), Goal(), SETTINGS, 1000.0)
    assert found is not None and found.row.different == found.row.outputs > 0


def test_the_best_of_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(name: str, request: PromptBatch) -> tuple[float, list[float]]:
        """Four at once are twice as fast together; a drafter pays for one at a time only."""
        count = len(request.prompts)
        took = (10 / ONE[name]) if count == 1 else (20 / ONE["none"] if name == "none" else 40 / ONE[name])
        return took, [took] * count

    asked = made_up(monkeypatch, seconds)
    found = tune(SUBJECT, SPECS, suite(48), Goal(batches=(1, 4)), SETTINGS, 1e6)
    assert found is not None and found.way == Way("none", 4)
    assert found.row.speed is not None and found.row.speed.tokens_per_second == pytest.approx(20.0)
    assert found.row.prompts == 48
    assert {count for _, count in asked} == {1, 4}
    alone = tune(SUBJECT, SPECS, suite(48), Goal(batches=(1,)), SETTINGS, 1e6)
    assert alone is not None and alone.way == Way(SPECS[1], 1)


def test_each_batch_has_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    asked = made_up(monkeypatch, ONE, clock)
    found = tune(SUBJECT, SPECS, suite(100), Goal(batches=(1, 4)), SETTINGS, 300.0, clock=clock)
    assert found is not None and found.seconds <= 305.0  # a run that was begun
    spent = {
        batch: sum(count * 10 / ONE[name] for name, count in asked if count == batch) for batch in (1, 4)
    }
    assert spent[1] == pytest.approx(150, abs=2) and spent[4] == pytest.approx(150, abs=5)
    with pytest.raises(OutpaceError, match="20 seconds are not enough"):
        tune(SUBJECT, SPECS, suite(48), Goal(batches=(1, 4)), SETTINGS, 20.0, clock=clock)


def test_latency_counts_the_seconds_of_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(name: str, request: PromptBatch) -> tuple[float, list[float]]:
        """All are done after 2 s; with one drafter three of four prompts are done after 1 s."""
        early = [1.0] * 3 if name == SPECS[2] else [2.0] * 3
        return 2.0 - 0.1 * (name == SPECS[1]), [*early, 2.0]

    made_up(monkeypatch, seconds)
    for objective, expected in (("throughput", SPECS[1]), ("latency", SPECS[2])):
        found = tune(SUBJECT, SPECS, suite(48), Goal(objective, (4,)), SETTINGS, 1e6)
        assert found is not None and found.way == Way(expected, 4)
    assert found is not None and found.row.speed is not None
    assert found.row.speed.tokens_per_second == pytest.approx(40 / 5)


def test_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    specs = [f"jacobi:num_speculative_tokens={size}" for size in range(2, 17)]
    made_up(monkeypatch, {spec: 10.0 + i for i, spec in enumerate(["none", *specs])}, clock)
    found = tune(SUBJECT, specs, suite(60), Goal(), SETTINGS, 60.0, clock=clock)
    assert found is not None and found.way.spec == specs[-1]
    assert found.seconds <= 60.0 + 1.0 and found.seconds == clock.now
    assert found.row.prompts > 5


def test_too_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    made_up(monkeypatch, ONE, clock)
    with pytest.raises(
        OutpaceError, match=r"6 seconds are not enough to measure each of 4 .* larger --budget"
    ):
        tune(SUBJECT, SPECS, suite(10), Goal(), SETTINGS, 6.0, clock=clock)


def test_measuring_steps_keeps_to_the_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    asked = made_up(monkeypatch, ONE, clock, width_seconds=2.0)
    with pytest.raises(OutpaceError, match="5 seconds are not enough to measure this model's steps"):
        tune(SUBJECT, SPECS, suite(10), Goal(batches=(1, 2)), SETTINGS, 5.0, clock=clock)
    assert clock.now == 6.0 and asked == []  # no width more than the one that was begun


def test_measuring_steps_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    asked = made_up(monkeypatch, ONE, clock, width_seconds=2.0)
    stopped = lambda: clock.now >= 4.0  # noqa: E731
    assert tune(SUBJECT, SPECS, suite(10), Goal(), SETTINGS, 1e6, stopped=stopped, clock=clock) is None
    assert clock.now == 4.0 and asked == []


def test_a_candidate_that_fails_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, ONE, broken=SPECS[1])
    found = tune(SUBJECT, SPECS, suite(10), Goal(), SETTINGS, 1000.0)
    assert found is not None and found.way.spec == SPECS[2]
    assert found.rows[Way(SPECS[1], 1)].error == "RuntimeError: no such kernel"
    made_up(monkeypatch, ONE, broken="none")
    with pytest.raises(OutpaceError, match="plain decoding failed: RuntimeError: no such kernel"):
        tune(SUBJECT, SPECS, suite(10), Goal(), SETTINGS, 1000.0)


def test_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = made_up(monkeypatch, ONE)
    stopped = lambda: len(asked) > 10  # noqa: E731
    assert tune(SUBJECT, SPECS, suite(10), Goal(), SETTINGS, 1000.0, stopped=stopped) is None
    assert len(asked) == 11
    assert verify(SUBJECT, Way(SPECS[1], 1), suite(4), Goal(), SETTINGS, lambda: True) is None


def test_verifying_takes_turns_with_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = made_up(monkeypatch, ONE)
    checked = verify(SUBJECT, Way(SPECS[2], 2), suite(9), Goal(batches=(1, 2)), SETTINGS, lambda: False)
    assert checked is not None and checked.differences == () and not checked.breaks_promise("same bits")
    assert checked.speed is not None and checked.speed.speedup == pytest.approx(1.2)
    assert checked.prompts == 8
    assert {name for name, _ in asked} == {"none", SPECS[2]} and {count for _, count in asked} == {2}
    plain = verify(SUBJECT, Way("none", 1), suite(3), Goal(), SETTINGS, lambda: False)
    assert plain is not None and plain.speed is not None and plain.speed.speedup == 1.0
    made_up(monkeypatch, ONE, broken=SPECS[2])
    with pytest.raises(OutpaceError, match="no such kernel"):
        verify(SUBJECT, Way(SPECS[2], 1), suite(9), Goal(), SETTINGS, lambda: False)


@pytest.mark.parametrize(
    ("promise", "apart", "broken"),
    [
        ("same tokens but for near-ties", 1e-3, True),
        ("same tokens but for near-ties", 9e-5, False),
        ("same tokens", 9e-5, True),
        ("same bits", 9e-5, True),
        ("not exact", 0.1, False),
    ],
)
def test_verifying_tells_a_broken_promise_from_a_near_tie(
    monkeypatch: pytest.MonkeyPatch, promise: Promise, apart: float, broken: bool
) -> None:
    """The first token of every output is another one than plain decoding's."""
    made_up(monkeypatch, ONE, wrong=SPECS[1])
    monkeypatch.setattr(tuning, "margin_of", lambda target, asked, output: apart)
    checked = verify(SUBJECT, Way(SPECS[1], 1), suite(3), Goal(), SETTINGS, lambda: False)
    assert checked is not None and checked.breaks_promise(promise) == broken
    assert [(one.item, one.index, one.plain, one.other, one.margin) for one in checked.differences] == [
        (str(place), 0, 0, 1, apart) for place in range(3)
    ]
    assert checked.different == checked.outputs == 3


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, ONE)
    with pytest.raises(OutpaceError, match=r"no objective 'size'\. There are: throughput, latency"):
        Goal("size")
    with pytest.raises(OutpaceError, match="give one --batch"):
        Goal("latency", (1, 4))
    with pytest.raises(OutpaceError, match="made up has 3 prompts, and 4 are decoded at a time"):
        tune(SUBJECT, SPECS, suite(3), Goal(batches=(4,)), SETTINGS, 1.0)
    with pytest.raises(OutpaceError, match="no drafter 'magic'"):
        tune(SUBJECT, ["magic"], suite(3), Goal(), SETTINGS, 1.0)


# -- early stopping --------------------------------------------------------------------------------------

SIXTEEN = {f"jacobi:num_speculative_tokens={i}": 10.0 + i for i in range(2, 18)}


def prompts_of(found: Any) -> list[int]:
    """The number of prompts that each candidate decoded, without plain decoding, the most first."""
    return sorted((row.prompts for way, row in found.rows.items() if way.spec != "none"), reverse=True)


def test_with_time_for_all_prompts_each_doubling_leaves_half_the_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_up(monkeypatch, {"none": 5.0, **SIXTEEN})
    found = tune(SUBJECT, list(SIXTEEN), suite(80), Goal(), SETTINGS, 1e9)
    assert found is not None and found.way.spec == "jacobi:num_speculative_tokens=17"
    prompts = prompts_of(found)
    assert prompts[:2] == [80, 80] and prompts[2] == 40 and prompts[4] == 20 and prompts[8] == 10
    assert found.rows[Way("none", 1)].prompts == 80


def test_each_doubling_of_the_candidates_takes_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are equally fast: of 4 doublings each has a quarter of the time."""
    clock = Clock()
    made_up(monkeypatch, dict.fromkeys(["none", *SIXTEEN], 10.0), clock)
    found = tune(SUBJECT, list(SIXTEEN), suite(400), Goal(), SETTINGS, 1000.0, clock=clock)
    assert found is not None
    prompts = prompts_of(found)
    # Seconds while 16 to 9, 8 to 5, 4 and 3, and 2 candidates were left, plain decoding beside them.
    left = [sum(count > done for count in prompts) for done in range(prompts[0])]
    for most, least in ((16, 9), (8, 5), (4, 3), (2, 2)):
        assert sum(count + 1 for count in left if least <= count <= most) == pytest.approx(250, abs=40)


def test_no_time_is_left_after_the_first_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    made_up(
        monkeypatch,
        dict.fromkeys(["none", *SIXTEEN], 10.0) | {"jacobi:num_speculative_tokens=9": 20.0},
        clock,
    )
    found = tune(SUBJECT, list(SIXTEEN), suite(100), Goal(), SETTINGS, 34.0, clock=clock)
    assert (
        found is not None
        and found.way.spec == "jacobi:num_speculative_tokens=9"
        and set(prompts_of(found)) == {1}
    )


def test_who_left_early_is_not_chosen_though_later_prompts_are_slower_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(name: str, request: PromptBatch) -> tuple[float, list[float]]:
        easy = request.prompts[0][0] <= 4
        took = {"none": 1.0, SPECS[0]: 0.9, SPECS[1]: 0.7, SPECS[2]: 0.8}[name] * (1 if easy else 10)
        return took, [took]

    made_up(monkeypatch, seconds)
    found = tune(SUBJECT, SPECS, suite(8), Goal(), SETTINGS, 1e9)
    assert found is not None and found.way.spec == SPECS[1]
    early, chosen = found.rows[Way(SPECS[0], 1)], found.row
    assert early.prompts == 4 and early.speed is not None and chosen.speed is not None
    assert early.speed.tokens_per_second > chosen.speed.tokens_per_second


@pytest.mark.parametrize("seed", first(2, range(8)))
def test_noise_costs_little(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Seconds of a prompt are off by up to a half, and the choice is among the best three of 32."""
    draws, clock = random.Random(seed), Clock()
    speeds = {"none": 1.0} | {f"jacobi:num_speculative_tokens={i}": 10.0 * 1.05**i for i in range(2, 34)}

    def seconds(name: str, request: PromptBatch) -> tuple[float, list[float]]:
        took = 10 / speeds[name] * (1 + 0.5 * draws.uniform(-1, 1))
        return took, [took]

    made_up(monkeypatch, seconds, clock)
    found = tune(SUBJECT, [*speeds][1:], suite(100), Goal(), SETTINGS, 900.0, clock=clock)
    assert found is not None and speeds[found.way.spec] >= 0.9 * max(speeds.values())
    assert found.seconds <= 900.0 + 15  # a run that was begun


def test_recorded_costs_a_fifth_of_the_grid_and_within_5_percent_of_its_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens and seconds of the embedded model on builtin's prompts, as recorded; warm-ups cost nothing."""
    table = json.loads(RECORDED.read_text())["candidates"]
    count, clock, warm = len(table["none"]["tokens"]), Clock(), set[str]()
    seen, unseen = range(0, count, 2), range(1, count, 2)
    grid = sum(one["seconds"][place] for one in table.values() for place in seen)

    def seconds(name: str, request: PromptBatch) -> tuple[float, list[float]]:
        took = table[name]["seconds"][seen[request.prompts[0][0] - 1]] if name in warm else 0.0
        warm.add(name)
        return took, [took]

    def speed(name: str, places: range) -> float:
        one = table[name]
        return sum(one["tokens"][p] for p in places) / sum(one["seconds"][p] for p in places)

    made_up(monkeypatch, seconds, clock)
    specs = [name for name in table if name != "none"]
    monkeypatch.setattr(tuning, "candidates", lambda given: [Candidate(name) for name in ["none", *given]])
    found = tune(SUBJECT, specs, suite(len(seen)), Goal(), SETTINGS, grid / 5, clock=clock)
    assert found is not None and found.seconds <= grid / 5 + 0.5
    best_of_grid = max(table, key=lambda name: speed(name, seen))
    assert speed(found.way.spec, unseen) >= 0.95 * speed(best_of_grid, unseen)


# -- candidates ------------------------------------------------------------------------------------------


def test_a_name_stands_for_itself_and_for_several_widths() -> None:
    names = ["lookahead", "prompt_lookup", "suffix", "token_recycling", "jacobi"]
    found = candidates(names)
    assert [one.spec for one in found if one.spec in ("none", *names)] == ["none", *names]
    for name in names:
        own = [one for one in found if one.spec.startswith(f"{name}:")]
        assert len(own) >= 3 and len({one.nodes for one in own}) >= 3
    for one in found:
        drafter = load_drafter(one.spec)
        if one.spec.startswith("lookahead:"):
            assert one.nodes == max(drafter.widths or ())
    assert len({one.spec for one in found}) == len(found)


def test_a_spec_stands_for_itself() -> None:
    spec = "suffix:num_speculative_tokens=5"
    assert [one.spec for one in candidates([spec, spec, "none"])] == ["none", spec]


def test_steps_that_are_too_long_are_left_out() -> None:
    """Steps of 9 rows take longer than may pay, and so do wider ones."""
    found = candidates(["token_recycling", "jacobi"])
    limit = COSTLIEST * 0.01
    kept = affordable(found, {1: 0.01, 4: limit, 9: 1.01 * limit, 16: 1.0})
    assert [one.spec for one in kept] == [
        "none",
        "token_recycling",
        "token_recycling:max_nodes=4",
        "jacobi",
        "jacobi:num_speculative_tokens=4",
    ]
    assert affordable(found, {1: 0.01, 64: limit}) == found
