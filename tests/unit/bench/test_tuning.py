"""Tuning with methods whose seconds are made up: what is chosen, what is expected, what time it takes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.bench import tuning, ways
from outpace.bench.candidates import COSTLIEST, affordable, candidates
from outpace.bench.items import Item, Suite
from outpace.bench.run import Settings
from outpace.bench.runs import Request, Run
from outpace.bench.tuning import tune, verify
from outpace.bench.ways import Goal, Way
from outpace.core import OutpaceError
from outpace.drafters import load_drafter

SETTINGS = Settings(max_new_tokens=10)
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
    speeds: dict[str, float] | Callable[[str, Request], tuple[float, list[float]]],
    clock: Clock | None = None,
    broken: str = "",
    wrong: str = "",
    width_seconds: float = 0.0,
) -> list[tuple[str, int]]:
    """Methods of these tokens per second; returns what will have been asked, by whom and how many prompts."""
    asked: list[tuple[str, int]] = []

    class Fake:
        peer = lossy = lone = adaptive = False
        promised = True
        verifier = "match"

        def __init__(self, subject: Any, spec: str, temperature: float) -> None:
            self.name = spec

        def begin(self, anew: bool = False) -> None:
            pass

        def run(self, request: Request) -> Run:
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
            return Run(outputs, seconds, 0.0, 0, steps=steps * len(outputs), last_seconds=last)

    def widths_of(
        target: Any, context: int, widths: tuple[int, ...], batch: int, before: Callable[[], None]
    ) -> list[float]:
        for _ in widths:
            before()
            if clock is not None:
                clock.now += width_seconds
        return [0.001 * width for width in widths]

    monkeypatch.setattr(ways, "Frugal", Fake)
    monkeypatch.setattr(tuning, "measure_widths", widths_of)
    return asked


ONE = {"none": 10.0, SPECS[0]: 8.0, SPECS[1]: 15.0, SPECS[2]: 12.0}


def test_the_fastest_is_chosen_and_what_to_expect_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, ONE)
    found = tune(SUBJECT, SPECS, suite(40), Goal(), SETTINGS, 1000.0)
    assert found is not None and found.way == Way(SPECS[1], 1)
    speed = found.speed
    assert speed.tokens_per_second == pytest.approx(15.0) and speed.plain == pytest.approx(10.0)
    assert speed.speedup == pytest.approx(1.5) and speed.interval == pytest.approx((1.5, 1.5))
    assert speed.mean_accepted_length == 2.0 and speed.equal == speed.outputs == speed.prompts >= 3
    assert found.halving.candidates["none"].measured == speed.prompts
    assert found.halving.candidates[SPECS[0]].measured < speed.prompts
    assert found.steps[1][1] == 0.001 and found.left_out == []
    assert found.taus == {"none": 1.0, **dict.fromkeys(SPECS, 2.0)}


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
    assert found is not None and found.way.spec == "none" and found.speed.speedup == 1.0


def test_outputs_that_are_not_plain_decodings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, ONE, wrong=SPECS[1])
    found = tune(SUBJECT, SPECS, suite(10), Goal(), SETTINGS, 1000.0)
    assert found is not None and found.speed.equal == 0 < found.speed.outputs


def test_the_best_of_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(name: str, request: Request) -> tuple[float, list[float]]:
        """Four at once are twice as fast together; a drafter pays for one at a time only."""
        count = len(request.prompts)
        took = (10 / ONE[name]) if count == 1 else (20 / ONE["none"] if name == "none" else 40 / ONE[name])
        return took, [took] * count

    asked = made_up(monkeypatch, seconds)
    found = tune(SUBJECT, SPECS, suite(48), Goal(batches=(1, 4)), SETTINGS, 1e6)
    assert found is not None and found.way == Way("none", 4)
    assert found.speed.tokens_per_second == pytest.approx(20.0) and found.speed.prompts % 4 == 0
    assert {count for _, count in asked} == {1, 4}
    alone = tune(SUBJECT, SPECS, suite(48), Goal(batches=(1,)), SETTINGS, 1e6)
    assert alone is not None and alone.way == Way(SPECS[1], 1)


def test_batches_count_together_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt at a time was measured when the time ran out, and four at once were not."""
    clock = Clock()
    assert Goal(batches=(2, 3)).unit == 6
    asked = made_up(monkeypatch, ONE, clock)
    with pytest.raises(OutpaceError, match="20 seconds are not enough"):
        tune(SUBJECT, SPECS, suite(48), Goal(batches=(1, 4)), SETTINGS, 20.0, clock=clock)
    assert asked.count(("none", 1)) == 1 + 4 and ("none", 4) in asked


def test_latency_counts_the_seconds_of_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(name: str, request: Request) -> tuple[float, list[float]]:
        """All are done after 2 s; with one drafter three of four prompts are done after 1 s."""
        early = [1.0] * 3 if name == SPECS[2] else [2.0] * 3
        return 2.0 - 0.1 * (name == SPECS[1]), [*early, 2.0]

    made_up(monkeypatch, seconds)
    for objective, expected in (("throughput", SPECS[1]), ("latency", SPECS[2])):
        found = tune(SUBJECT, SPECS, suite(48), Goal(objective, (4,)), SETTINGS, 1e6)
        assert found is not None and found.way == Way(expected, 4)
    assert found is not None and found.speed.tokens_per_second == pytest.approx(40 / 5)


def test_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    specs = [f"jacobi:num_speculative_tokens={size}" for size in range(2, 17)]
    made_up(monkeypatch, {spec: 10.0 + i for i, spec in enumerate(["none", *specs])}, clock)
    found = tune(SUBJECT, specs, suite(500), Goal(), SETTINGS, 60.0, clock=clock)
    assert found is not None and found.way.spec == specs[-1]
    assert found.seconds <= 60.0 + 1.0 and found.seconds == clock.now
    assert found.speed.prompts > 5


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
    assert "no such kernel" in str(found.halving.candidates[SPECS[1]].failed)
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
    assert checked is not None and checked.differences == () and not checked.broken
    assert checked.speed.speedup == pytest.approx(1.2) and checked.speed.prompts == 8
    assert {name for name, _ in asked} == {"none", SPECS[2]} and {count for _, count in asked} == {2}
    plain = verify(SUBJECT, Way("none", 1), suite(3), Goal(), SETTINGS, lambda: False)
    assert plain is not None and plain.speed.speedup == 1.0
    made_up(monkeypatch, ONE, broken=SPECS[2])
    with pytest.raises(OutpaceError, match="no such kernel"):
        verify(SUBJECT, Way(SPECS[2], 1), suite(9), Goal(), SETTINGS, lambda: False)


@pytest.mark.parametrize(
    ("dtype", "apart", "broken"),
    [
        ("float32", 1e-3, True),
        ("float32", 9e-5, False),
        ("float64", 1e-3, True),
        ("bfloat16", 1e-3, False),
        ("float16", 0.1, False),
    ],
)
def test_verifying_tells_a_broken_promise_from_a_near_tie(
    monkeypatch: pytest.MonkeyPatch, dtype: str, apart: float, broken: bool
) -> None:
    """The first token of every output is another one than plain decoding's."""
    made_up(monkeypatch, ONE, wrong=SPECS[1])
    monkeypatch.setattr(tuning, "margin", lambda target, text: apart)
    subject = SimpleNamespace(**{**vars(SUBJECT), "dtype": dtype})
    checked = verify(subject, Way(SPECS[1], 1), suite(3), Goal(), SETTINGS, lambda: False)
    assert checked is not None and checked.broken == broken
    assert [(one.item, one.index, one.plain, one.other, one.margin) for one in checked.differences] == [
        (str(place), 0, 0, 1, apart) for place in range(3)
    ]
    assert checked.speed.equal == 0 and checked.speed.outputs == 3


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, ONE)
    with pytest.raises(OutpaceError, match="no objective 'size'; there are: throughput, latency"):
        Goal("size")
    with pytest.raises(OutpaceError, match="give one --batch"):
        Goal("latency", (1, 4))
    with pytest.raises(OutpaceError, match="made up has 3 prompts, and 4 are decoded at a time"):
        tune(SUBJECT, SPECS, suite(3), Goal(batches=(4,)), SETTINGS, 1.0)
    with pytest.raises(OutpaceError, match="no drafter 'magic'"):
        tune(SUBJECT, ["magic"], suite(3), Goal(), SETTINGS, 1.0)


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
