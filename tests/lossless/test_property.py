"""One property: tokens are those of plain decoding, whatever is drafted and who joins, leaves or gives way.

``make test`` tries fixed examples. ``make test-all`` tries others in each run, and prints those that fail;
``OUTPACE_EXAMPLES`` sets their number.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.cache import KVCache
from outpace.core import Draft, SamplingParams, Speculation
from outpace.drafters import SequenceDrafter
from outpace.drafters.base import Drafter
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine import scheduler
from outpace.engine.engine import Engine
from outpace.sequence import Sequence, Step
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget
from outpace.testing.checks import Budgets

MORE = int(os.environ.get("OUTPACE_EXAMPLES", "1000"))
EOS = 3


class Mixing(ToyTarget):
    """A target whose steps take rows of prompts along."""

    mixes = True


def target(mixes: bool = False) -> ToyTarget:
    return (Mixing if mixes else ToyTarget)(context=None, eos=EOS)


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """Plain decoding of one prompt, in an engine of its own."""
    return Engine(target()).generate([prompt], params)[0].tokens


@cache
def hidden_states(text: tuple[int, ...]) -> Tensor:
    model = target()
    rows = model.new_cache(1, len(text))
    slot = rows.allocate()
    return model.forward(rows, Batch.of({slot: text}, None), (-1,)).hidden[slot][-1]


@dataclass
class Read:
    """A sequence, and the hidden states of its rows that have arrived."""

    sequence: Sequence
    rows: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Guesses(SequenceDrafter[Read]):
    """Drafts trees of every shape, some of whose tokens are right.

    It checks the hidden states that it reads: those of the text's rows, each once, in order.
    """

    shape: str = "tree"
    reads: bool = False

    paper: ClassVar[str] = "none: for tests"

    @property
    def trees(self) -> bool:
        return self.shape == "tree"

    def hidden_layers(self, shared: Any) -> tuple[int, ...]:
        return (-1,) if self.reads else ()

    def start(self, sequence: Sequence, shared: Any) -> Read:
        return Read(sequence)

    def read(self, states: Any, hidden: Any) -> None:
        for state, layers in zip(states, hidden, strict=True):
            state.rows.append(layers[-1])

    def learn(self, state: Read, step: Step) -> None:
        if self.reads:
            state.rows.append(step.committed[-1])

    def draft(self, state: Read) -> Draft:
        text = state.sequence
        if self.reads:
            self.check(state)
        chance = np.random.default_rng([text.output_length, *text.tokens[-3:]])
        plain = alone(tuple(text.prompt), replace(text.params, speculation=None))[text.output_length :]
        parents: list[int] = []
        tokens: list[int] = []
        depths: list[int] = []
        for node in range(chance.integers(8)):
            parent = node - 1 if self.shape == "chain" else int(chance.integers(-1, node))
            depth = depths[parent] + 1 if parent >= 0 else 0
            right = depth < len(plain) and chance.random() < 0.8
            parents.append(parent)
            depths.append(depth)
            tokens.append(plain[depth] if right else int(chance.integers(32)))
        seen = set(zip(parents, tokens, strict=True))
        return (
            Draft(tokens, parents) if len(seen) == len(tokens) else Draft(tokens, range(-1, len(tokens) - 1))
        )

    def check(self, state: Read) -> None:
        text = tuple(state.sequence.tokens[:-1])
        if text:
            torch.testing.assert_close(torch.cat(state.rows), hidden_states(text))


DRAFTERS: dict[str, Drafter[Any] | str] = {
    "chain": Guesses("chain"),
    "tree": Guesses("tree"),
    "a model": DraftModel(ToyTarget(surprise=0.7), 3),
    "window": "lookahead:window=3,ngram=3",
    "copy": "suffix:num_speculative_tokens=6",
}
# It needs the rows of whole prompts: no prefix is then taken from the cache.
READS: dict[str, Drafter[Any] | str] = {"reads states": Guesses("tree", reads=True)}
CHOICES = [None, "off", *DRAFTERS, Speculation("tree", 2), Speculation(num_speculative_tokens=0)]
BEGINNING = [4 + (7 * place) % 28 for place in range(70)]


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    most = draw(st.sampled_from([48, 48, 36, 7, 1, 0]))
    return SamplingParams(
        max_new_tokens=most,
        temperature=draw(st.sampled_from([0.0, 0.9, 1.4])),
        top_k=draw(st.sampled_from([0, 4])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        seed=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.sampled_from([(), (), (), (7, 19)])),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        min_tokens=draw(st.integers(0, min(most, 6))),
    )


@dataclass(frozen=True)
class Request:
    """A sequence, the step before which it joins, and the one before which it leaves, if it does."""

    prompt: list[int]
    params: SamplingParams
    joins: int
    leaves: int | None
    priority: int


@st.composite
def requests(draw: st.DrawFn) -> Request:
    prompt = BEGINNING[: draw(st.sampled_from([40, 36, 70, 5, 0]))] + draw(
        st.lists(st.integers(4, 31), min_size=1, max_size=4)
    )
    joins = draw(st.integers(0, 3))
    leaves = draw(st.sampled_from([None, None, None, None, joins + 1, joins + 6]))
    params = replace(draw(parameters()), speculation=draw(st.sampled_from(CHOICES)))
    return Request(prompt, params, joins, leaves, draw(st.integers(0, 1)))


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    model = target(draw(st.booleans()))
    row = model.new_cache().row_bytes
    budgets = draw(st.none() | st.lists(st.sampled_from([-1, 0, 1, 2, 64]), min_size=1, max_size=5))
    return Engine(
        model,
        draw(st.sampled_from([*DRAFTERS.values(), *READS.values()])),
        adaptive=Budgets(cycle(budgets)) if budgets else False,
        drafters=DRAFTERS,
        prefill_chunk=draw(st.sampled_from([1, 5, 16, 512])),
        length=64,
        memory=draw(st.sampled_from([200 * row, 150 * row, None])),
        prefix_cache=draw(st.sampled_from([300 * row, None])),
        max_running=draw(st.sampled_from([None, None, 1, 3])),
    )


def run(engine: Engine, asked: list[Request]) -> Counter[str]:
    """Decode requests that join and leave, compare each with plain decoding, and count what happened."""
    seen: Counter[str] = Counter()
    release = engine._batch.release

    def note(active: Any) -> None:
        seen["preempted"] += active.sequence.finish_reason is None and active.sequence.output_length > 0
        release(active)

    engine._batch.release = note  # type: ignore[method-assign]
    running: dict[int, Sequence] = {}
    step = 0
    while engine.sequences or len(running) < len(asked):
        for place, request in enumerate(asked):
            if request.joins == step:
                running[place] = engine.add(request.prompt, request.params, priority=request.priority)
            if request.leaves == step:
                engine.remove(running[place])
        engine.step()
        step += 1
    for place, request in enumerate(asked):
        sequence = running[place]
        sequence.check()
        expected = alone(tuple(request.prompt), replace(request.params, speculation=None))
        removed = sequence.finish_reason == "removed"
        assert sequence.output == expected[: len(sequence.output) if removed else None], request
        stats = sequence.stats
        seen.update(removed=removed, accepted=stats.accepted, cached=stats.cached_tokens)
        seen["rejected"] += stats.drafted - stats.accepted
        seen[sequence.finish_reason or ""] += 1
    assert not len(engine._batch.cache)
    return seen


@pytest.fixture(autouse=True, scope="module")
def tight() -> Any:
    """Reserve few rows for answers, so that sequences outgrow them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "_least_room", 64)
        patch.setattr(scheduler, "_ANSWER", 16)
        patch.setattr(scheduler, "_DRAFT", 8)
        yield


def decode(examples: int, **options: Any) -> Counter[str]:
    """Decode this many generated batches, and count what happened in them."""
    seen: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), **options)
    @given(engines(), st.lists(requests(), min_size=3, max_size=6))
    def batch(engine: Engine, asked: list[Request]) -> None:
        seen.update(run(engine, asked))

    batch()
    return seen


def test_tokens_are_those_of_plain_decoding() -> None:
    seen = decode(50)
    happened = ("preempted", "removed", "accepted", "rejected", "cached", "eos", "stop", "length")
    assert min(seen[what] for what in happened) > 0, seen


@pytest.mark.slow
def test_tokens_are_those_of_plain_decoding_on_other_examples() -> None:
    decode(MORE, derandomize=False, print_blob=True)
