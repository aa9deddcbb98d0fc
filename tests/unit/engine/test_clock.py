"""Where the seconds of a step are counted: each part of it takes a time of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from outpace.core import Draft, SamplingParams
from outpace.drafters.base import SequenceDrafter
from outpace.engine.engine import Engine
from outpace.policy.governor import Pinned
from outpace.policy.plan import Outcome
from outpace.sequence import Sequence, Step
from outpace.testing import ToyTarget
from outpace.verify import load_verifier

# Powers of two, so that a sum says what is in it.
DRAFT, FORWARD, VERIFY, KEEP, OBSERVE, OBSERVER, LEARN, LEAVE = (2.0**power for power in range(8))


class Time:
    """A clock that stands still while nothing takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taken_by(self, call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """The function, with a time that each call of it takes."""

        def slow(*given: Any, **named: Any) -> Any:
            self.now += seconds
            return call(*given, **named)

        return slow


@dataclass(frozen=True)
class Slow(SequenceDrafter[None]):
    """Drafter of one token."""

    time: Time = field(compare=False)

    def start(self, sequence: Sequence, shared: Any) -> None:
        return None

    def draft(self, state: None) -> Draft:
        self.time.now += DRAFT
        return Draft([1], [-1])

    def learn(self, state: None, step: Step) -> None:
        self.time.now += OBSERVE

    def stop(self, state: None) -> None:
        self.time.now += LEAVE


class Policy(Pinned):
    """Policy that keeps what it is told."""

    time: Time
    told: list[Outcome]

    def learn(self, outcome: Outcome) -> None:
        self.time.now += LEARN
        self.told.append(outcome)


class Watcher:
    """An observer that takes its time."""

    hidden_layers: tuple[int, ...] = ()
    timed = False

    def __init__(self, time: Time) -> None:
        self.stepped = time.taken_by(lambda steps: None, OBSERVER)

    def joined(self, sequence: Sequence, hidden: Mapping[int, Any]) -> None:
        pass

    def left(self, sequence: Sequence) -> None:
        pass


@contextmanager
def engine(patch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Policy]]:
    time, target, policy = Time(), ToyTarget(), Policy(1)
    object.__setattr__(policy, "time", time)
    object.__setattr__(policy, "told", [])
    verifier = load_verifier("match")
    made = Engine(target, Slow(time), verifier, adaptive=policy, observer=Watcher(time), clock=time)
    patch.setattr(target, "forward", time.taken_by(target.forward, FORWARD))
    patch.setattr(type(verifier), "verify", time.taken_by(type(verifier).verify, VERIFY))
    patch.setattr(made._batch.cache, "keep", time.taken_by(made._batch.cache.keep, KEEP))
    yield made, policy


def test_each_part_of_a_step_is_counted_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch) as (made, policy):
        sequence = made.add([5], SamplingParams(max_new_tokens=9, ignore_eos=True))
        made.step()
        stats = sequence.stats
        assert stats.seconds_draft == pytest.approx(DRAFT + OBSERVE + OBSERVER)
        assert stats.seconds_verify == pytest.approx(FORWARD + VERIFY)
        assert stats.seconds_rest == pytest.approx(KEEP + LEARN)
        assert stats.seconds_prefill == pytest.approx(0, abs=1e-6)
        (outcome,) = policy.told
        assert outcome.draft_seconds == pytest.approx(DRAFT + OBSERVE + OBSERVER)
        assert outcome.verify_seconds == pytest.approx(FORWARD + VERIFY + KEEP)


def test_a_forward_with_rows_of_a_prompt_is_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch) as (made, _):
        sequence = made.add([5, 6, 7], SamplingParams(max_new_tokens=9, ignore_eos=True))
        made.step()
        assert sequence.stats.seconds_prefill == pytest.approx(FORWARD + VERIFY)
        assert sequence.stats.seconds_verify == 0
        made.step()
        assert sequence.stats.seconds_prefill == pytest.approx(FORWARD + VERIFY)
        assert sequence.stats.seconds_verify == pytest.approx(FORWARD + VERIFY)


def test_the_last_step_has_the_seconds_of_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch) as (made, _):
        sequence = made.add([5], SamplingParams(max_new_tokens=1, ignore_eos=True))
        made.step()
        assert sequence.finish_reason == "length"
        assert sequence.stats.seconds_rest == pytest.approx(KEEP + LEARN + LEAVE)
