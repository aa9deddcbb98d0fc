"""Invariants of requests that are added, stepped, cancelled and preempted in any order."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.cache import KVCache
from outpace.core import SamplingParams
from outpace.engine import scheduler
from outpace.engine.engine import Engine
from outpace.sequence import Sequence
from outpace.testing import ToyTarget

_PASSED = 8
_CAPACITY = 160

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 30)]]
PARAMS = [
    SamplingParams(max_new_tokens=40, ignore_eos=True),
    SamplingParams(max_new_tokens=25, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=6, temperature=0.7, seed=4, presence_penalty=1.0),
    SamplingParams(max_new_tokens=30, temperature=1.0, seed=5, ignore_eos=True, speculation="off"),
]
REQUESTS = st.tuples(st.sampled_from(range(len(PROMPTS))), st.sampled_from(range(len(PARAMS))))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), REQUESTS),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    min_size=3,
    max_size=30,
)


@functools.cache
def alone(prompt: int, params: int) -> list[int]:
    return Engine(ToyTarget(context=None)).generate([PROMPTS[prompt]], PARAMS[params])[0].tokens


class Watched:
    """An engine with little memory, and what has been seen of its requests."""

    def __init__(self) -> None:
        target = ToyTarget(context=None)
        memory = _CAPACITY * target.new_cache().row_bytes
        self.engine = Engine(
            target, "prompt_lookup", adaptive=False, memory=memory, length=16, prefill_chunk=4, max_running=4
        )
        self.requests: list[tuple[tuple[int, int], Sequence]] = []
        self.cancelled: list[Sequence] = []
        self.joined: list[Sequence] = []
        self.put_back = 0

    def add(self, request: tuple[int, int]) -> None:
        prompt, params = request
        self.requests.append((request, self.engine.add(PROMPTS[prompt], PARAMS[params])))

    def cancel(self, place: int) -> None:
        if self.requests:
            sequence = self.requests[place % len(self.requests)][1]
            self.engine.remove(sequence)
            self.cancelled.append(sequence)

    def step(self) -> None:
        before = {id(active.sequence) for active in self.engine._batch.active}
        lengths = {id(s): s.output_length for _, s in self.requests}
        took_part = self.engine.step()
        now = [active.sequence for active in self.engine._batch.active]
        self.joined += [one for one in now if not any(one is other for other in self.joined)]
        waiting = self.engine._batch.scheduler.waiting
        self.put_back += sum(id(one) in before for one in waiting)
        cache = self.engine._batch.cache
        assert cache.capacity is not None and cache.reserved <= cache.capacity  # memory is never exceeded
        assert len(now) <= 4
        for sequence in took_part:  # no gap: who takes part emits
            assert sequence.output_length > lengths[id(sequence)] or sequence.finish_reason is not None
        self.check_order(waiting)

    def check_order(self, waiting: list[Sequence]) -> None:
        """Check that no request waits behind more than 8 later ones."""
        order = [sequence for _, sequence in self.requests]
        for sequence in waiting:
            if any(sequence is one for one in self.joined):
                continue  # it was put back, and goes on
            place = next(i for i, one in enumerate(order) if one is sequence)
            later = [one for one in order[place + 1 :] if any(one is other for other in self.joined)]
            assert len(later) <= _PASSED

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.sequences:
                break
            self.step()
        assert not self.engine.sequences and len(self.engine._batch.cache) == 0  # idle means zero
        for (prompt, params), sequence in self.requests:
            expected = alone(prompt, params)
            assert sequence.finish_reason is not None and sequence.error is None
            if any(sequence is one for one in self.cancelled) and sequence.finish_reason == "removed":
                assert sequence.output == expected[: sequence.output_length]
            else:
                assert sequence.output == expected


def play(operations: list[tuple[str, object]]) -> Watched:
    watched = Watched()
    for name, argument in operations:
        if name == "step":
            assert isinstance(argument, int)
            for _ in range(argument):
                watched.step()
        else:
            getattr(watched, name)(argument)
    watched.finish()
    return watched


@contextmanager
def little_room() -> Iterator[None]:
    """Few rows are reserved ahead, so that sequences outgrow them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "_least_room", 16)
        patch.setattr(scheduler, "_ANSWER", 4)
        patch.setattr(scheduler, "_DRAFT", 4)
        yield


@settings(max_examples=15)
@given(OPERATIONS)
def test_any_order_of_operations(operations: list[tuple[str, object]]) -> None:
    with little_room():
        play(operations)


def test_some_are_put_back_and_go_on_with_the_same_tokens() -> None:
    with little_room():
        assert play([("add", (3, 0))] * 4 + [("step", 6), ("add", (1, 2)), ("cancel", 1)]).put_back
