"""Admission, prompts in chunks, and memory shortage: the tokens are those of plain decoding."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from outpace.cache import KVCache
from outpace.core import OutpaceError, SamplingParams
from outpace.engine import scheduler
from outpace.engine.chunks import Pace
from outpace.engine.engine import Engine
from outpace.engine.memory import capacity_of
from outpace.sequence import Sequence
from outpace.targets.batch import Batch
from outpace.targets.hardware import free_bytes
from outpace.targets.rows import Output
from outpace.testing import ToyTarget

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 8), *range(1, 8), *range(1, 4)]]
GREEDY = SamplingParams(max_new_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=30, temperature=1.0, seed=3, ignore_eos=True)


class Widths(ToyTarget):
    """A target that records the rows that slots feed to each forward, and whether logits were requested."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[tuple[list[int], bool]] = []

    def forward(self, cache: Any, batch: Batch, *args: Any) -> Output:
        self.seen.append((batch.widths.tolist(), len(batch.read) > 0))
        return super().forward(cache, batch, *args)


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    return Engine(ToyTarget(context=None)).generate([prompt], params)[0].tokens


def finish(engine: Engine) -> None:
    while engine.sequences:
        engine.step()


def text(length: int, first: int = 0) -> list[int]:
    return [1 + (first + 7 * place) % 31 for place in range(length)]


def rows(target: ToyTarget, count: int) -> int:
    """Bytes of some rows."""
    return count * target.new_cache().row_bytes


# -- chunks ------------------------------------------------------------------------------------------------


class Mixing(Widths):
    """A target whose forwards mix rows of prompts with those of steps."""

    mixes = True


@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_a_long_prompt_joins_in_chunks(drafter: Any) -> None:
    target = Widths(context=None)
    engine = Engine(target, drafter, prefill_chunk=64)
    first = [engine.add(prompt, replace(SAMPLED, max_new_tokens=40)) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    target.seen.clear()
    before = [s.stats.steps for s in first]
    long = engine.add(text(150), GREEDY)
    while not long.output_length:
        steps = [s.stats.steps for s in first]
        engine.step()
        # Each step of the others brings one chunk at most, in a forward of its own.
        assert all(s.finish_reason or s.stats.steps == n + 1 for s, n in zip(first, steps, strict=True))
    chunks = [widths for widths, decoding in target.seen if not decoding]
    assert len(chunks) > 2 and all(len(widths) == 1 and widths[0] <= 64 for widths in chunks)
    assert sum(widths[0] for widths in chunks) == 149
    assert first[0].stats.steps > before[0]
    finish(engine)
    for sequence in [*first, long]:
        assert sequence.output == alone(tuple(sequence.prompt), sequence.params)


@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_a_chunk_rides_in_the_step_where_the_target_mixes_rows(drafter: Any) -> None:
    target = Mixing(context=None)
    engine = Engine(target, drafter, prefill_chunk=64)
    first = [engine.add(prompt, replace(SAMPLED, max_new_tokens=40)) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    target.seen.clear()
    long = engine.add(text(150), GREEDY)
    steps = 0
    while not long.output_length:
        steps += 1
        engine.step()
    assert steps > 2 and len(target.seen) == steps and all(decoding for _, decoding in target.seen)
    assert sum(widths[-1] for widths, _ in target.seen) >= 150  # the root is in the last forward
    finish(engine)
    for sequence in [*first, long]:
        assert sequence.output == alone(tuple(sequence.prompt), sequence.params)
    assert long.stats.seconds_prefill > 0


@pytest.mark.parametrize("mixing", [False, True])
def test_several_prompts_share_a_chunk(mixing: bool) -> None:
    """The first gets half, and the shortest of the others the rest."""
    target = (Mixing if mixing else Widths)(context=None)
    engine = Engine(target, prefill_chunk=64)
    engine._batch.scheduler.pace.rows = lambda *_: 32  # type: ignore[method-assign]
    engine.add(PROMPTS[0], replace(SAMPLED, max_new_tokens=40))
    engine.step()
    target.seen.clear()
    joined = [engine.add(text(size, size), GREEDY) for size in (40, 30, 13)]
    engine.step()
    # The last one has all its rows, and in a forward with others its root.
    assert target.seen[0] == (([1, 13, 16, 4], True) if mixing else ([16, 12, 4], False))
    assert bool(joined[2].output_length)
    finish(engine)
    for sequence in joined:
        assert sequence.output == alone(tuple(sequence.prompt), GREEDY)


@pytest.mark.parametrize("mixing", [False, True])
def test_the_last_rows_ride_where_no_one_decodes(mixing: bool) -> None:
    target = (Mixing if mixing else Widths)(context=None)
    Engine(target, prefill_chunk=64).generate([text(60), text(40)], replace(GREEDY, max_new_tokens=1))
    assert target.seen == ([([60, 40], True)] if mixing else [([20], False), ([40, 40], True)])


def test_prompts_of_which_none_ends_have_a_forward_of_their_own() -> None:
    target = Mixing(context=None)
    engine = Engine(target, prefill_chunk=16)
    sequences = [engine.add(text(40, place), replace(GREEDY, max_new_tokens=2)) for place in range(2)]
    engine.step()
    assert target.seen == [([16, 16], False)]
    finish(engine)
    assert [one.output for one in sequences] == [alone(tuple(one.prompt), one.params) for one in sequences]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = Engine(ToyTarget(context=None), prefill_chunk=16)
    long, short = engine.add(text(150), GREEDY), engine.add(text(9), GREEDY)
    engine.step()
    assert short.output_length and not long.output_length
    finish(engine)
    assert long.output == alone(tuple(text(150)), GREEDY)


def test_a_pace_costs_half_a_step() -> None:
    """A forward takes 1 s, 0.1 per decoding row, and 1/80 per row of a prompt."""
    pace = Pace(512)
    assert pace.rows(10) == 16 and pace.row_seconds is None
    for step in range(20):
        rows = pace.rows(10)
        pace.measured(10, 10 + step % 2, 0, 2.0 + 0.1 * (step % 2))
        pace.measured(10, 10, rows, 2.0 + rows / 80)
    assert pace.rows(10) == pytest.approx(80, abs=1)  # 1 s
    # 15 sequences would take 2.5 s, and half as much again; 10 take 2 s.
    assert pace.rows(10, 5) == pytest.approx((1.5 * 2.5 - 2.0) * 80, abs=1)
    assert pace.row_seconds == pytest.approx(1 / 80)
    assert pace.without(40, 2.5) == pytest.approx(2.0)
    assert pace.without(400, 7.0) is None and pace.without(0, 2.0) == 2.0


def test_the_pace_of_drafts() -> None:
    """Sequences are expected to bring as many rows as in the latest step."""
    pace = Pace(512)
    for step in range(20):
        drafted = 10 * (1 + step % 2)
        pace.measured(10, drafted, 0, 1.0 + 0.1 * drafted)
        pace.measured(10, 40, 100, 5.0 + 1.0)
    assert pace.rows(10) == pytest.approx(2.5 / 0.01, abs=60)


def test_a_pace_grows_by_two_at_most() -> None:
    pace = Pace(512)
    sizes = []
    for _ in range(8):
        sizes.append(pace.rows(1))
        pace.measured(1, 1, 0, 1.0)
        pace.measured(1, 1, sizes[-1], 1.0)  # rows that cost nothing
    assert sizes == [16, 32, 64, 128, 256, 512, 512, 512] and pace.row_seconds is None
    assert Pace(4).rows(1) == 4


# -- who joins ---------------------------------------------------------------------------------------------


def test_requests_wait_for_memory_and_may_be_passed_eight_times() -> None:
    target = ToyTarget(context=None)
    engine = Engine(target, memory=rows(target, 1024))
    params = replace(GREEDY, max_new_tokens=6)
    for place in range(3):
        engine.add(text(9, place), params)
    engine.step()
    big = engine.add(text(900), params)
    order: list[Sequence] = []
    later = [engine.add(text(9, place), params) for place in range(20)]
    while engine.sequences:
        engine.step()
        order += [a.sequence for a in engine._batch.scheduler.active if a.sequence not in order]
        assert engine._batch.cache.reserved <= 1024
    assert order.index(big) == 3 + 8
    for sequence in [big, *later]:
        assert sequence.output == alone(tuple(sequence.prompt), params)


def test_priority_goes_first() -> None:
    target = ToyTarget(context=None)
    engine = Engine(target, memory=rows(target, 256), length=64)
    params = replace(GREEDY, max_new_tokens=100)
    sequences = [engine.add(text(9, place), params, priority=place // 2) for place in range(4)]
    order: list[int] = []
    while engine.sequences:
        for sequence in engine.step():
            place = sequences.index(sequence)
            if place not in order:
                order.append(place)
    assert order[0] in (2, 3) and order.index(2) < order.index(0) < order.index(1)


def test_clients_join_in_turns() -> None:
    engine = Engine(ToyTarget(context=None), max_running=1)
    names = ["a"] * 5 + ["b"] * 2 + ["c"]
    asked = [engine.add([1 + number, 2], GREEDY, client=name) for number, name in enumerate(names)]
    joined: list[str] = []
    while engine.sequences:
        engine.step()
        joined += [one.client for one in asked if one.output_length == 1]
    assert "".join(joined) == "abcabaaa"


def test_what_never_fits_is_refused() -> None:
    target = ToyTarget(context=None)
    engine = Engine(target, memory=rows(target, 300))
    with pytest.raises(OutpaceError, match=r"300 rows.*max_new_tokens"):
        engine.add(text(200), replace(GREEDY, max_new_tokens=200))
    assert not engine.sequences
    assert Engine(target, memory=rows(target, 300)).generate([text(200)], GREEDY)[0].tokens == alone(
        tuple(text(200)), GREEDY
    )


# -- who gives way -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "prefix_cache"),
    [(None, None), ("prompt_lookup:branches=2", 1 << 20), ("lookahead:window=3,ngram=3", None)],
)
def test_a_sequence_goes_on_with_the_same_tokens(
    drafter: Any, prefix_cache: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "_least_room", 64)
    monkeypatch.setattr(scheduler, "_ANSWER", 16)
    monkeypatch.setattr(scheduler, "_DRAFT", 8)
    target = ToyTarget(context=None)
    engine = Engine(target, drafter, length=64, memory=rows(target, 150), prefix_cache=prefix_cache)
    requests = [(text(20, place), replace(SAMPLED, max_new_tokens=60, seed=place)) for place in range(3)]
    sequences = [engine.add(*request) for request in requests]
    gone: list[Sequence] = []
    release = engine._batch.release

    def note(active: Any) -> None:
        if active.sequence.finish_reason is None:
            gone.append(active.sequence)
        release(active)

    engine._batch.release = note  # type: ignore[method-assign]
    while engine.sequences:
        engine.step()
        assert engine._batch.cache.reserved <= 150
    assert gone and sequences[0] not in gone
    assert any(sequence.stats.cached_tokens for sequence in gone) == (prefix_cache is not None)
    for sequence, (prompt, params) in zip(sequences, requests, strict=True):
        assert sequence.output == alone(tuple(prompt), params)
        assert sequence.stats.tokens == 60
        assert not sequence.stats.cached_tokens or (sequence in gone and prefix_cache)
    assert len(engine._batch.cache) == 0


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["1", True, 0, -5, [1]])
def test_memory_is_a_number(memory: Any) -> None:
    with pytest.raises(OutpaceError, match="memory must be a number of bytes"):
        Engine(ToyTarget(), memory=memory)


def test_memory_in_rows() -> None:
    target = ToyTarget()
    cache = target.new_cache()
    assert capacity_of(None, cache, target.device) is None
    assert capacity_of(10 * cache.row_bytes + 1, cache, target.device) == 10
    free = free_bytes(target.device)
    if free is not None:
        share = capacity_of(0.5, cache, target.device)
        assert share is not None and abs(share * cache.row_bytes / free - 0.5) < 0.2
