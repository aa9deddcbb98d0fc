"""One bad request never affects another: an error specific to one sequence ends that sequence alone."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from outpace.core import Draft, NoTokenLeft, OutpaceError, SamplingParams
from outpace.drafters import SequenceDrafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.none import NoDraft
from outpace.engine.clock import Clock
from outpace.engine.engine import Engine
from outpace.sequence import Sequence, Step
from outpace.targets.batch import Batch
from outpace.targets.rows import Output
from outpace.testing import ToyTarget
from outpace.tree import chain

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 8), *range(1, 8), *range(1, 4)]]
PARAMS = [
    SamplingParams(max_new_tokens=30, ignore_eos=True),
    SamplingParams(max_new_tokens=30, temperature=1.0, seed=3, ignore_eos=True),
]
BAD = 2  # the prompt whose request goes wrong


class Broken(RuntimeError):
    """An exception raised on purpose."""


class Numbers:
    """A tokenizer whose text is the token ids in digits; it breaks at a token."""

    def __init__(self, breaks_at: Callable[[list[int]], bool]) -> None:
        self._breaks_at = breaks_at

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        if self._breaks_at(token_ids):
            raise Broken("a tokenizer's own")
        return "".join(f" {token}" for token in token_ids)


@functools.cache
def plain(params: SamplingParams) -> list[list[int]]:
    return [found.tokens for found in Engine(ToyTarget()).generate(PROMPTS, params)]


def check(engine: Engine, sequences: Seq[Sequence], params: SamplingParams, kind: type[Exception]) -> None:
    """The bad one has ended with its error and true tokens, the others are whole, nothing is left behind."""
    while engine.sequences:
        engine.step()
    expected = plain(params)
    for place, (sequence, tokens) in enumerate(zip(sequences, expected, strict=True)):
        if place == BAD:
            assert sequence.finish_reason == "error" and isinstance(sequence.error, kind)
            assert sequence.output == tokens[: len(sequence.output)] != tokens
            assert sequence.stats.tokens == len(sequence.output)
            generation = sequence.generation()
            assert (generation.finish_reason, generation.error) == ("error", sequence.error)
        else:
            assert (sequence.output, sequence.error) == (tokens, None)
        assert sequence.place is None
    assert len(engine._batch.cache) == 0
    assert [found.tokens for found in engine.generate(PROMPTS, params)] == expected


def after(count: int, processor: bool) -> Callable[..., Any]:
    """A criterion or a logits processor that fails at the ``count``-th output token of the bad prompt."""

    def criterion(tokens: list[int]) -> bool:
        if len(tokens) >= len(PROMPTS[BAD]) + count:
            raise Broken("a criterion's own")
        return False

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= len(PROMPTS[BAD]) + count:
            raise Broken("a processor's own")
        return scores

    return process if processor else criterion


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["prompt_lookup:branches=2", "lookahead:window=3,ngram=3"])
@pytest.mark.parametrize("count", [0, 7])
@pytest.mark.parametrize("processor", [False, True])
def test_a_criterion_or_processor_that_fails(
    drafter: Any, params: SamplingParams, count: int, processor: bool
) -> None:
    engine, fails = Engine(ToyTarget(), drafter), after(count, processor)
    sequences = [
        engine.add(
            prompt,
            replace(params, logits_processors=[fails]) if processor and place == BAD else params,
            criteria=fails if not processor and place == BAD else None,
        )
        for place, prompt in enumerate(PROMPTS)
    ]
    check(engine, sequences, params, Broken)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["none", "prompt_lookup:branches=2"])
def test_a_fault_while_tokens_are_chosen_for_all(
    drafter: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence's penalties fail, which are counted in one pass with those of the others."""
    params = replace(params, frequency_penalty=0.2)
    engine = Engine(ToyTarget(), drafter)
    sequences = [engine.add(prompt, params) for prompt in PROMPTS]
    processor = sequences[BAD].processor
    counts = processor.counts

    def fail(more: Seq[int] = ()) -> Any:
        if sequences[BAD].output_length >= 5:
            raise Broken("counting")
        return counts(more)

    monkeypatch.setattr(processor, "counts", fail)
    check(engine, sequences, params, Broken)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_tokens_that_cannot_be_chosen_for_all_are_chosen_node_by_node(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise Broken("the pass for all")

    monkeypatch.setattr("outpace.engine.step.own_tokens", fail)
    found = Engine(ToyTarget(), "prompt_lookup").generate(PROMPTS, params)
    assert [one.tokens for one in found] == plain(params)
    assert "the pass for all" in caplog.text


@pytest.mark.parametrize("bias", [dict.fromkeys(range(32), -math.inf)])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_no_token_left(params: SamplingParams, bias: dict[int, float]) -> None:
    engine = Engine(ToyTarget(), "prompt_lookup")
    sequences = [
        engine.add(prompt, replace(params, logit_bias=bias) if place == BAD else params)
        for place, prompt in enumerate(PROMPTS)
    ]
    check(engine, sequences, params, NoTokenLeft)
    assert not sequences[BAD].output


class Spoilt(ToyTarget):
    """A target with one logit that is NaN, in one forward, for the sequence in the third slot."""

    length, done = 12, False

    def forward(self, cache: Any, batch: Batch, *args: Any, **kwargs: Any) -> Output:
        output = super().forward(cache, batch, *args, **kwargs)
        slot = next((slot for slot in batch.slots if slot.number == BAD), None)
        if output.logits is None or slot is None or cache.length(slot) < self.length or self.done:
            return output
        self.done = True
        logits = output.logits.clone()
        logits[output.spans[slot], 7] = math.nan
        return replace(output, logits=logits)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_logits_that_are_not_numbers(params: SamplingParams) -> None:
    engine = Engine(Spoilt(), "prompt_lookup", adaptive=False)
    sequences = [engine.add(prompt, params) for prompt in PROMPTS]
    while engine.sequences:
        engine.step()
    assert [type(s.error) for s in sequences] == [type(None), type(None), NoTokenLeft, type(None)]
    expected = plain(params)
    assert [s.output for s in sequences] == [
        tokens[: len(s.output)] for s, tokens in zip(sequences, expected, strict=True)
    ]
    assert len(sequences[BAD].output) < 30


def test_a_tokenizer_that_fails() -> None:
    bad = plain(PARAMS[1])[BAD]
    others = [tokens for place, tokens in enumerate(plain(PARAMS[1])) if place != BAD]
    window = bad[7:10]
    assert not any(tokens[i : i + 3] == window for tokens in others for i in range(28))
    engine = Engine(ToyTarget(), "prompt_lookup", tokenizer=Numbers(lambda ids: ids[-3:] == window))
    sequences = [engine.add(prompt, replace(PARAMS[1], stop="none")) for prompt in PROMPTS]
    while engine.sequences:
        engine.step()
    assert isinstance(sequences[BAD].error, Broken)
    assert sequences[BAD].generation().tokens == bad[:10]
    assert [s.output for s in sequences if s.error is None] == others


@dataclass(frozen=True)
class Faulty(SequenceDrafter[Sequence]):
    """Drafts a pair of tokens; one of its methods fails for the bad prompt, after some tokens."""

    method: str

    paper: ClassVar[str] = "none"

    def _fail(self, sequence: Sequence, method: str) -> None:
        late = method == "start" or sequence.output_length > 5
        if method == self.method and sequence.prompt == PROMPTS[BAD] and late:
            raise Broken(method)

    def start(self, sequence: Sequence, shared: Any) -> Sequence:
        self._fail(sequence, "start")
        return sequence

    def draft(self, state: Sequence) -> Draft:
        self._fail(state, "draft")
        if self.method == "ids" and state.prompt == PROMPTS[BAD] and state.output_length > 5:
            return chain([31, 32])
        return chain([1, 2])

    def learn(self, state: Sequence, step: Step) -> None:
        self._fail(state, "learn")

    def stop(self, state: Sequence) -> None:
        self._fail(state, "stop")


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["start", "draft", "learn", "ids"])
def test_a_drafter_that_fails_for_one(method: str, params: SamplingParams) -> None:
    engine = Engine(ToyTarget(), Faulty(method), adaptive=False)
    sequences = [engine.add(prompt, params) for prompt in PROMPTS]
    while engine.sequences:
        engine.step()
    assert [s.finish_reason for s in sequences] == ["length", "length", "error", "length"]
    assert isinstance(sequences[BAD].error, OutpaceError if method == "ids" else Broken)
    for sequence, tokens in zip(sequences, plain(params), strict=True):
        assert sequence.output == tokens[: len(sequence.output)]
    assert len(engine._batch.cache) == 0


def test_a_drafter_that_cannot_stop() -> None:
    engine = Engine(ToyTarget(), Faulty("stop"))
    found = engine.generate(PROMPTS, PARAMS[0], errors="return")
    assert [g.finish_reason for g in found] == ["length", "length", "error", "length"]
    assert [g.tokens for g in found] == plain(PARAMS[0])


class Together(NoDraft):
    """Drafts for all sequences in one call, and fails in the third."""

    @property
    def calls(self) -> Any:
        return _CALLS

    def propose(self, states: Seq[None]) -> list[Draft]:
        if next(_CALLS) == 2:
            raise Broken("together")
        return [chain([4]) for _ in states]


_CALLS = itertools.count()


def test_a_drafter_that_fails_for_all() -> None:
    engine = Engine(ToyTarget(), Together())
    found = engine.generate(PROMPTS, PARAMS[0], errors="return")
    assert [type(g.error) for g in found] == [Broken] * 4
    assert [g.tokens for g in found] == [
        t[: len(g.tokens)] for g, t in zip(found, plain(PARAMS[0]), strict=True)
    ]
    assert [g.tokens for g in engine.generate(PROMPTS, PARAMS[0])] == plain(PARAMS[0])


class Failing(ToyTarget):
    """A target whose forwards fail: where memory runs out, those over more than two sequences."""

    error: Exception | None = None

    def forward(self, cache: Any, batch: Batch, *args: Any, **kwargs: Any) -> Output:
        if self.error is not None and (not isinstance(self.error, MemoryError) or len(batch.slots) > 2):
            raise self.error
        return super().forward(cache, batch, *args, **kwargs)


def test_a_failed_forward_ends_those_in_it() -> None:
    target = Failing()
    engine = Engine(target, "prompt_lookup")
    sequences = [engine.add(prompt, PARAMS[0]) for prompt in PROMPTS]
    engine.step()
    target.error = Broken("a forward's own")
    assert engine.step() == sequences
    assert [s.error for s in sequences] == [target.error] * 4
    assert not engine.sequences and len(engine._batch.cache) == 0
    target.error = None
    assert [g.tokens for g in engine.generate(PROMPTS, PARAMS[0])] == plain(PARAMS[0])


def test_the_newest_go_where_memory_runs_out() -> None:
    target = Failing()
    engine = Engine(target, "prompt_lookup")
    sequences = [engine.add(prompt, PARAMS[1]) for prompt in PROMPTS]
    engine.step()
    target.error = MemoryError("full")
    while engine.sequences:
        engine.step()
    assert [s.finish_reason for s in sequences] == ["length", "length", "error", "error"]
    assert [s.output for s in sequences[:2]] == plain(PARAMS[1])[:2]


def test_an_interrupt_empties_the_engine() -> None:
    engine = Engine(ToyTarget(), "prompt_lookup")

    def interrupt(tokens: list[int]) -> bool:
        if len(tokens) > 10:
            raise KeyboardInterrupt
        return False

    sequences = [engine.add(prompt, PARAMS[0], criteria=interrupt) for prompt in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        while engine.sequences:
            engine.step()
    assert {s.finish_reason for s in sequences} == {"removed"}
    assert engine.sequences == [] and len(engine._batch.cache) == 0
    assert [g.tokens for g in engine.generate(PROMPTS, PARAMS[0])] == plain(PARAMS[0])


@pytest.mark.parametrize("place", ["joined", "stepped", "left"])
def test_an_observer_that_fails_empties_the_engine(place: str) -> None:
    class Observes:
        hidden_layers: tuple[int, ...] = ()
        timed = False
        calls = 0

        def __getattr__(self, name: str) -> Callable[..., None]:
            def called(*given: Any) -> None:
                self.calls += name == place
                if name == place and self.calls == 2:
                    raise Broken(name)

            return called

    engine = Engine(ToyTarget(), "prompt_lookup", observer=Observes())
    sequences = [engine.add(prompt, PARAMS[0]) for prompt in PROMPTS]
    with pytest.raises(Broken, match=place):
        while engine.sequences:
            engine.step()
    assert {one.finish_reason for one in sequences} <= {"removed", "length"}
    assert engine.sequences == [] and len(engine._batch.cache) == 0
    assert [found.tokens for found in engine.generate(PROMPTS, PARAMS[0])] == plain(PARAMS[0])


def test_generate_raises_or_returns() -> None:
    engine = Engine(ToyTarget(), "prompt_lookup")
    params = [
        replace(PARAMS[0], logits_processors=[after(4, True)]) if place == BAD else PARAMS[0]
        for place in range(4)
    ]
    with pytest.raises(Broken):
        engine.generate(PROMPTS, params)
    assert not engine.sequences
    found = engine.generate(PROMPTS, params, errors="return")
    assert [g.error is None for g in found] == [True, True, False, True]
    with pytest.raises(OutpaceError, match="'raise' or 'return'"):
        engine.generate(PROMPTS, params, errors="ignore")  # type: ignore[arg-type]


def test_a_stream_raises_after_its_last_token() -> None:
    engine = Engine(ToyTarget(), "prompt_lookup")
    tokens = []
    with pytest.raises(Broken):
        for token in engine.stream(PROMPTS[BAD], replace(PARAMS[0], logits_processors=[after(6, True)])):
            tokens.append(token.token)
    assert tokens == plain(PARAMS[0])[BAD][: len(tokens)] and len(tokens) == 6
    assert not engine.sequences


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_combined_refuses_what_it_could_not_weigh(verifier: str) -> None:
    model = DraftModel(ToyTarget(surprise=0.7), 3)
    several = Combined((model, PromptLookup()))
    with pytest.raises(OutpaceError, match="merges sampled drafts"):
        Engine(ToyTarget(), several, verifier)
    with pytest.raises(OutpaceError, match="merges sampled drafts"):
        Engine(ToyTarget(), Combined((several,)), verifier)
    if verifier == "rejection":
        Engine(ToyTarget(), Combined((replace(model, draws="greedy"), PromptLookup())), verifier)
    Engine(ToyTarget(), several, "match")


# -- whose an engine is ------------------------------------------------------------------------------------


def in_thread(call: Callable[[], Any]) -> Exception | None:
    """The exception that a call raises in another thread, which lives until the call has ended."""
    caught: list[Exception | None] = [None]

    def run() -> None:
        try:
            call()
        except Exception as error:
            caught[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0]


def calls(engine: Engine, sequence: Sequence) -> dict[str, Callable[[], Any]]:
    return {
        "add": lambda: engine.add([1]),
        "remove": lambda: engine.remove(sequence),
        "step": engine.step,
        "sequences": lambda: engine.sequences,
        "generate": lambda: engine.generate([[1]]),
        "stream": lambda: engine.stream([1]),
        "make_room": lambda: engine.make_room(1, 1),
    }


@pytest.mark.parametrize("name", ["add", "remove", "step", "sequences", "generate", "stream", "make_room"])
def test_another_thread_is_refused(name: str) -> None:
    engine = Engine(ToyTarget())
    sequence = engine.add(PROMPTS[0], PARAMS[0])
    engine.step()
    error = in_thread(calls(engine, sequence)[name])
    assert isinstance(error, OutpaceError) and "belongs to the thread" in str(error)
    while engine.sequences:
        engine.step()
    assert sequence.output == plain(PARAMS[0])[0]


@pytest.mark.parametrize("name", ["add", "remove", "step", "sequences", "generate", "stream", "make_room"])
def test_a_call_within_a_step_is_refused(name: str) -> None:
    engine = Engine(ToyTarget())
    other = engine.add(PROMPTS[1], PARAMS[0])

    def criterion(tokens: list[int]) -> bool:
        calls(engine, other)[name]()
        return False

    sequence = engine.add(PROMPTS[0], PARAMS[0], criteria=criterion)
    while engine.sequences:
        engine.step()
    assert isinstance(sequence.error, OutpaceError) and "in the middle of a call" in str(sequence.error)
    assert other.output == plain(PARAMS[0])[1]


def test_an_engine_outlives_its_thread() -> None:
    engine = Engine(ToyTarget())
    assert in_thread(lambda: engine.generate([PROMPTS[0]], PARAMS[0])) is None
    assert engine.generate([PROMPTS[0]], PARAMS[0])[0].tokens == plain(PARAMS[0])[0]


# -- the clock, and arguments ------------------------------------------------------------------------------

READINGS = {
    "stopped": lambda n: 5.0,
    "backwards": lambda n: -float(n),
    "jumping": lambda n: math.sin(n) * 1e300,
    "nan": lambda n: math.nan,
    "infinite": lambda n: math.inf if n % 3 else float(n),
}


@pytest.mark.parametrize("name", READINGS)
def test_any_clock_will_do(name: str) -> None:
    ticks = itertools.count()
    engine = Engine(ToyTarget(), "prompt_lookup", adaptive=True, clock=lambda: READINGS[name](next(ticks)))
    params = replace(PARAMS[1], max_new_tokens=40)
    found = engine.generate(PROMPTS, params)
    assert [g.tokens for g in found] == plain(params)
    assert all(0 < g.stats.seconds < math.inf for g in found)


@pytest.mark.parametrize("name", READINGS)
def test_seconds_increase(name: str) -> None:
    ticks = itertools.count()
    clock = Clock(lambda: READINGS[name](next(ticks)))
    seconds = [clock() for _ in range(100)]
    assert all(0 < later - earlier < math.inf for earlier, later in itertools.pairwise(seconds))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in ("prefill_chunk", "slots", "length")
        for value in (1.5, "2", True, None, 0, -1, torch.tensor(1.0))
        if name != "prefill_chunk" or value is not None  # its default
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OutpaceError, match=f"{name} must be a whole number of at least 1"):
        Engine(ToyTarget(), **{name: value})


def test_a_clock_is_a_function() -> None:
    with pytest.raises(OutpaceError, match="clock is a function"):
        Engine(ToyTarget(), clock=1.0)  # type: ignore[arg-type]
