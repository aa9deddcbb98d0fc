"""The hidden states that a drafter gets: those of every committed row, once, equal to a plain forward's."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from outpace.core import Draft, SamplingParams
from outpace.drafters import Drafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.none import NoDraft
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.engine.engine import Engine
from outpace.policy.governor import Pinned
from outpace.policy.plan import Outcome
from outpace.sequence import Sequence, Step
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget

LAYERS = (0, 2, -1)
PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 9), *range(1, 9), 1, 2, 3]]
PARAMS = [
    SamplingParams(max_new_tokens=20),
    SamplingParams(max_new_tokens=24, temperature=0.8, seed=3, ignore_eos=True),
]


@dataclass
class Reading:
    """The states that arrived for a sequence: layer -> parts of its rows."""

    sequence: Sequence
    inner: Any
    rows: dict[int, list[Tensor]] = field(default_factory=lambda: {layer: [] for layer in LAYERS})
    proposed: int = 0


@dataclass(frozen=True)
class Reader(Drafter[Reading]):
    """A wrapper of a drafter that records every hidden state it gets."""

    inner: Drafter[Any] = field(default_factory=lambda: PromptLookup(branches=2))
    readings: list[Reading] = field(default_factory=list, compare=False)

    paper: ClassVar[str] = "none"
    trees: ClassVar[bool] = True

    def hidden_layers(self, shared: Any) -> tuple[int, ...]:
        return LAYERS

    def start(self, sequence: Sequence, shared: Any) -> Reading:
        self.readings.append(Reading(sequence, self.inner.start(sequence, None)))
        return self.readings[-1]

    def read(self, states: Seq[Reading], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for state, rows in zip(states, hidden, strict=True):
            assert not state.proposed and not state.rows[0], "read comes first, and once"
            assert len(rows[0]) == len(state.sequence.tokens) - 1
            self._take(state, rows)

    def propose(self, states: Seq[Reading]) -> list[Draft]:
        for state in states:
            state.proposed += 1
            assert sum(map(len, state.rows[0])) == len(state.sequence.tokens) - 1, "all rows but the root"
        return self.inner.propose([state.inner for state in states])

    def observe(self, states: Seq[Reading], steps: Seq[Step]) -> None:
        for state, step in zip(states, steps, strict=True):
            assert all(len(rows) == 1 + len(step.draft) for rows in step.hidden.values())
            self._take(state, step.committed)
        self.inner.observe([state.inner for state in states], steps)

    def _take(self, state: Reading, rows: Mapping[int, Tensor]) -> None:
        assert set(rows) == set(LAYERS)
        for layer in LAYERS:
            state.rows[layer].append(rows[layer])


def check(target: ToyTarget, readings: Seq[Reading]) -> None:
    for reading in readings:
        arrived = {layer: torch.cat(parts) for layer, parts in reading.rows.items()}
        # The last token is never fed, and where a text ends on an accepted token neither is that one used.
        text = reading.sequence.tokens[: len(arrived[0])]
        assert len(text) == len(arrived[0]) >= len(reading.sequence.tokens) - 1
        cache = target.new_cache()
        slot = cache.allocate()
        plain = target.forward(cache, Batch.of({slot: text}), LAYERS).hidden[slot]
        for layer in LAYERS:
            assert torch.allclose(arrived[layer], plain[layer]), (layer, len(text))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(
    ("inner", "chunk"),
    [
        *((PromptLookup(branches=2), chunk) for chunk in (1, 3, 512)),
        (Lookahead(window=4, ngram=3, guesses=4), 512),  # whose paths are not the first rows of its trees
    ],
)
def test_every_row_arrives_once(inner: Drafter[Any], chunk: int, params: SamplingParams) -> None:
    target, reader = ToyTarget(), Reader(inner)
    found = Engine(target, reader, prefill_chunk=chunk, adaptive=False).generate(PROMPTS[1:], params)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(target).generate(PROMPTS[1:], params)]
    assert sum(g.stats.accepted for g in found) > 0
    check(target, reader.readings)


def test_prompts_of_one_token_have_nothing_to_read() -> None:
    target, reader = ToyTarget(), Reader()
    Engine(target, reader, adaptive=False).generate([[5], [7]], PARAMS[0])
    check(target, reader.readings)


@pytest.mark.parametrize("mixes", [False, True])
def test_sequences_that_join_later_leave_and_go_on(mixes: bool) -> None:
    target, reader = ToyTarget(), Reader()
    target.mixes = mixes
    engine = Engine(target, reader, prefill_chunk=4, adaptive=False)
    (whole,) = Engine(target).generate([PROMPTS[1]], PARAMS[1])
    first = engine.add(PROMPTS[3], PARAMS[1])
    engine.step()
    rest = [engine.add(PROMPTS[1], PARAMS[1], output=whole.tokens[:there]) for there in (0, 9)]
    engine.step()
    engine.remove(first)
    engine.add(PROMPTS[0], PARAMS[0])
    while engine.sequences:
        engine.step()
    assert [sequence.output for sequence in rest] == [whole.tokens] * 2
    check(target, reader.readings)


def test_steps_without_a_draft_hand_over_their_row() -> None:
    target, reader = ToyTarget(), Reader()
    Engine(target, reader, adaptive=Pinned(0)).generate(PROMPTS, PARAMS[0])
    assert not any(reading.proposed for reading in reader.readings)
    check(target, reader.readings)


def test_a_part_hears_of_rows_that_another_proposed() -> None:
    """The reader's own drafts are empty: all that is accepted comes from the other part."""
    target, reader = ToyTarget(), Reader(inner=NoDraft())
    found = Engine(target, Combined((reader, PromptLookup(branches=3))), adaptive=False).generate(
        PROMPTS, PARAMS[1]
    )
    assert sum(g.stats.accepted for g in found) > 0
    check(target, reader.readings)


def test_the_step_before_the_states_of_a_prompt_are_read_is_plain_and_not_counted_by_the_policy() -> None:
    class Recording(Pinned):
        outcomes: ClassVar[list[Outcome]] = []

        def learn(self, outcome: Outcome) -> None:
            self.outcomes.append(outcome)

    target, reader = ToyTarget(), Reader()
    engine = Engine(target, reader, adaptive=Recording(4))
    for _ in range(2):
        sequence = engine.add(PROMPTS[3], PARAMS[1])
        engine.step()
        assert not engine._batch.active[0].hidden  # handed over, and not kept
        while engine.sequences:
            engine.step()
        assert reader.readings[-1].proposed == len(Recording.outcomes) == sequence.stats.steps - 1
        assert sequence.stats.drafted > 0
        Recording.outcomes.clear()
    check(target, reader.readings)
