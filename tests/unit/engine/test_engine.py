"""The loop: whole generations, streams, a batch that changes, stops, limits, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import outpace
from models import tiny_llama
from outpace.cache import Cache, Slot
from outpace.core import ContextOverflow, Draft, OutpaceError, SamplingParams
from outpace.drafters.none import NoDraft
from outpace.engine.engine import Engine
from outpace.sequence import Step
from outpace.targets import Output, TargetModel
from outpace.tree import chain

PROMPTS = [[5, 9, 2, 30, 9, 2, 11], [17], [40, 41, 42, 40, 41, 42, 40, 41, 42, 40, 41]]
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=3)
LOOKAHEAD = "lookahead:window=4,ngram=4,guesses=4"


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(48 + t) for t in token_ids)


class Counting(TargetModel):
    """A target that counts its forwards."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self.vocabulary, self.context = target.vocabulary, target.context
        self.eos_token_ids = target.eos_token_ids
        self.forwards = 0

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> Cache:
        return self._target.new_cache(slots, length, capacity)

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        self.forwards += 1
        return self._target.forward(*args, **kwargs)


@pytest.fixture(scope="module")
def target() -> outpace.targets.TargetModel:
    return outpace.Target(tiny_llama())


def stock(prompt: list[int], new_tokens: int) -> list[int]:
    model = tiny_llama()
    output = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("drafter", ["none", LOOKAHEAD])
def test_greedy_tokens_are_those_of_transformers(target: outpace.targets.TargetModel, drafter: str) -> None:
    found = Engine(target, drafter, adaptive=False).generate(PROMPTS, SamplingParams(max_new_tokens=24))
    assert [g.tokens for g in found] == [stock(prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=24), SAMPLED])
def test_lookahead_says_what_plain_decoding_says(
    target: outpace.targets.TargetModel, params: SamplingParams
) -> None:
    plain = Engine(target).generate(PROMPTS, params)
    fast = Engine(target, LOOKAHEAD, adaptive=False).generate(PROMPTS, params)
    assert [g.tokens for g in fast] == [g.tokens for g in plain]
    assert sum(g.stats.accepted for g in fast) > 0


@pytest.mark.parametrize("prompt_length", [1, 2, 5, 9, 10, 11])
@pytest.mark.parametrize("drafter", ["none", LOOKAHEAD])
def test_a_prompt_of_one_chunk_costs_no_forward_of_its_own(
    target: outpace.targets.TargetModel, drafter: str, prompt_length: int
) -> None:
    prompts = [[3 * i % 50 for i in range(prompt_length)], [7 * i % 50 for i in range(prompt_length + 2)]]
    for batch in (prompts[:1], prompts):
        counting = Counting(target)
        engine = Engine(counting, drafter, prefill_chunk=9, adaptive=False)
        found = engine.generate(batch, SamplingParams(max_new_tokens=8))
        assert [g.tokens for g in found] == [stock(prompt, 8) for prompt in batch]
        longest, shortest = len(batch[-1]) - 1, len(batch[0]) - 1
        chunks = -(-(longest - min(9, shortest)) // 9)
        assert counting.forwards == chunks + max(g.stats.steps for g in found)


def test_who_shares_the_batch_does_not_matter(target: outpace.targets.TargetModel) -> None:
    params = [
        SAMPLED,
        SamplingParams(max_new_tokens=9),
        SamplingParams(max_new_tokens=15, temperature=0.7, seed=8),
    ]
    together = Engine(target, LOOKAHEAD, adaptive=False).generate(PROMPTS, params)
    alone = [
        Engine(target, LOOKAHEAD, adaptive=False).generate([p], s)[0]
        for p, s in zip(PROMPTS, params, strict=True)
    ]
    assert [g.tokens for g in together] == [g.tokens for g in alone]


def test_sequences_join_and_leave_between_steps(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target, LOOKAHEAD, adaptive=False)
    params = SamplingParams(max_new_tokens=24)
    first = engine.add(PROMPTS[0], params)
    engine.step()
    doomed = engine.add(PROMPTS[1], params)
    last = engine.add(PROMPTS[2], params)
    engine.step()
    engine.remove(doomed)
    while engine.sequences:
        engine.step()
    assert first.generation().tokens == stock(PROMPTS[0], 24)
    assert last.generation().tokens == stock(PROMPTS[2], 24)
    assert doomed.generation().finish_reason == "removed"
    assert doomed.output == stock(PROMPTS[1], 24)[: len(doomed.output)]


def test_a_prompt_is_prefilled_in_chunks(target: outpace.targets.TargetModel) -> None:
    found = Engine(target, LOOKAHEAD, prefill_chunk=3, adaptive=False).generate(
        PROMPTS, SamplingParams(max_new_tokens=12)
    )
    assert [g.tokens for g in found] == [stock(prompt, 12) for prompt in PROMPTS]


def test_a_stream_yields_each_token_with_its_step(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target, LOOKAHEAD, tokenizer=Letters(), adaptive=False)
    tokens = list(engine.stream(PROMPTS[2], SamplingParams(max_new_tokens=24)))
    whole = engine.generate([PROMPTS[2]], SamplingParams(max_new_tokens=24))[0]
    assert [t.token for t in tokens] == whole.tokens
    assert "".join(t.text for t in tokens) == whole.text
    assert sorted(t.step for t in tokens) == [t.step for t in tokens]
    assert tokens[-1].step == whole.stats.steps


def test_a_closed_stream_leaves_the_batch(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target)
    stream = engine.stream(PROMPTS[0], SamplingParams(max_new_tokens=24))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not engine.sequences


def test_plain_decoding_takes_as_many_steps_as_tokens(target: outpace.targets.TargetModel) -> None:
    stats = Engine(target).generate([PROMPTS[0]], SamplingParams(max_new_tokens=10))[0].stats
    assert (stats.steps, stats.tokens, stats.drafted, stats.accepted) == (10, 10, 0, 0)
    assert stats.mean_accepted_length == 1.0


def test_counts_add_up(target: outpace.targets.TargetModel) -> None:
    generation = Engine(target, LOOKAHEAD, adaptive=False).generate(
        [PROMPTS[2]], SamplingParams(max_new_tokens=24)
    )[0]
    stats = generation.stats
    assert stats.tokens == len(generation.tokens) == 24
    assert stats.steps <= stats.tokens <= stats.steps + stats.accepted
    assert sum(stats.accepted_per_position) == stats.accepted <= stats.drafted
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
    assert stats.extra["guessed"] <= stats.drafted
    assert stats.seconds > 0


@pytest.mark.parametrize("drafter", ["none", LOOKAHEAD])
def test_an_end_of_sequence_token_ends_it_and_is_included(
    target: outpace.targets.TargetModel, drafter: str
) -> None:
    whole = stock(PROMPTS[2], 24)
    stop = whole[9]
    params = SamplingParams(max_new_tokens=24, stop_token_ids=[stop])
    found = Engine(target, drafter, adaptive=False).generate([PROMPTS[2]], params)[0]
    assert found.tokens == whole[: whole.index(stop) + 1]
    assert found.finish_reason == "stop"


def test_eos_of_the_model_is_honoured_or_ignored() -> None:
    model = tiny_llama()
    whole = stock(PROMPTS[2], 24)
    model.generation_config.eos_token_id = [whole[5]]
    engine = Engine(model, LOOKAHEAD, adaptive=False)
    ended = engine.generate([PROMPTS[2]], SamplingParams(max_new_tokens=24))[0]
    assert ended.tokens == whole[: whole.index(whole[5]) + 1]
    assert ended.finish_reason == "eos"
    assert (
        engine.generate([PROMPTS[2]], SamplingParams(max_new_tokens=24, ignore_eos=True))[0].tokens == whole
    )


@pytest.mark.parametrize("drafter", ["none", LOOKAHEAD])
def test_a_stop_string_ends_it_in_the_middle_of_a_path(
    target: outpace.targets.TargetModel, drafter: str
) -> None:
    whole = Engine(target, tokenizer=Letters()).generate([PROMPTS[2]], SamplingParams(max_new_tokens=24))[0]
    assert whole.text is not None
    stop = whole.text[6:9]
    end = whole.text.index(stop)
    params = SamplingParams(max_new_tokens=24, stop=stop)
    found = Engine(target, drafter, tokenizer=Letters(), adaptive=False).generate([PROMPTS[2]], params)[0]
    assert found.tokens == whole.tokens[: end + 3]
    assert (found.text, found.finish_reason) == (whole.text[:end], "stop")


def test_stop_strings_without_a_tokenizer_are_an_error(target: outpace.targets.TargetModel) -> None:
    with pytest.raises(OutpaceError, match="stop strings need a tokenizer"):
        Engine(target).generate([[1]], SamplingParams(stop="x"))


@pytest.mark.parametrize("drafter", ["none", LOOKAHEAD])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_no_more_tokens_than_asked_for(target: outpace.targets.TargetModel, drafter: str, count: int) -> None:
    found = Engine(target, drafter, adaptive=False).generate(
        [PROMPTS[2]], SamplingParams(max_new_tokens=count)
    )[0]
    assert found.tokens == stock(PROMPTS[2], 24)[:count]
    assert found.finish_reason == "length"


@pytest.mark.parametrize("drafter", ["none", LOOKAHEAD])
def test_the_context_is_a_limit(drafter: str) -> None:
    engine = Engine(tiny_llama(context=16), drafter, adaptive=False)
    found = engine.generate([PROMPTS[2], [7] * 16], SamplingParams(max_new_tokens=100))
    assert [(len(g.tokens), g.finish_reason) for g in found] == [(5, "length"), (0, "length")]
    with pytest.raises(ContextOverflow, match="17 tokens, the model's context 16"):
        engine.generate([[7] * 17])


def test_a_prompt_must_be_tokens_of_the_model(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target)
    with pytest.raises(OutpaceError, match="prompt is empty"):
        engine.generate([[]])
    with pytest.raises(OutpaceError, match="token 97 is outside the model's vocabulary of 97"):
        engine.generate([[97]])
    with pytest.raises(OutpaceError, match="2 prompts but 1 SamplingParams"):
        engine.generate([[1], [2]], [SamplingParams()])
    assert not engine.sequences


def test_a_bad_prompt_leaves_its_neighbours_out(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target)
    with pytest.raises(OutpaceError):
        engine.generate([[1], []])
    assert not engine.sequences


def test_a_seed_repeats_and_none_is_reported(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target, LOOKAHEAD, adaptive=False)
    free = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=20, temperature=1.0))[0]
    again = SamplingParams(max_new_tokens=20, temperature=1.0, seed=free.seed)
    assert engine.generate([PROMPTS[0]], again)[0].tokens == free.tokens
    other = SamplingParams(max_new_tokens=20, temperature=1.0, seed=free.seed ^ 1)
    assert engine.generate([PROMPTS[0]], other)[0].tokens != free.tokens


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=20), SAMPLED])
def test_a_processor_sees_each_prefix_once_and_in_order(
    target: outpace.targets.TargetModel, params: SamplingParams
) -> None:
    seen: list[list[int]] = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        seen.append(input_ids[0].tolist())
        return scores

    params = SamplingParams(**{**vars(params), "logits_processors": [note]})
    found = Engine(target, LOOKAHEAD, adaptive=False).generate([PROMPTS[2]], params)[0]
    assert seen == [PROMPTS[2] + found.tokens[:i] for i in range(len(found.tokens))]


def test_an_error_in_a_processor_leaves_the_engine_usable(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target, LOOKAHEAD, adaptive=False)

    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 12:
            raise RuntimeError("a processor's own")
        return scores

    with pytest.raises(RuntimeError, match="a processor's own"):
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=20, logits_processors=[fail]))
    assert not engine.sequences
    assert engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=8))[0].tokens == stock(PROMPTS[0], 8)


@pytest.mark.parametrize("drafter", ["none", LOOKAHEAD])
def test_logprobs_are_of_the_raw_distribution(target: outpace.targets.TargetModel, drafter: str) -> None:
    params = SamplingParams(
        max_new_tokens=10, temperature=0.5, top_k=5, logit_bias={3: 2.0}, logprobs=2, seed=1
    )
    found = Engine(target, drafter, adaptive=False).generate([PROMPTS[0]], params)[0]
    text = torch.tensor([PROMPTS[0] + found.tokens])
    with torch.inference_mode():
        rows = tiny_llama()(text).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    assert found.logprobs is not None
    for token, row, entry in zip(found.tokens, rows, found.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        top = row.topk(2)
        assert entry.top == pytest.approx(
            dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)), abs=1e-5
        )


def test_criteria_end_a_sequence(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target, LOOKAHEAD, adaptive=False)
    until: Callable[[list[int]], bool] = lambda tokens: len(tokens) >= len(PROMPTS[0]) + 5  # noqa: E731
    sequence = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=20), criteria=until)
    while engine.sequences:
        engine.step()
    assert sequence.generation().tokens == stock(PROMPTS[0], 5)
    assert sequence.generation().finish_reason == "stop"


def test_names_that_do_not_exist_are_refused(target: outpace.targets.TargetModel) -> None:
    with pytest.raises(OutpaceError, match="Did you mean 'lookahead'"):
        Engine(target, "lookahed")
    with pytest.raises(OutpaceError, match=r"no verifier 'typicle'\. Did you mean 'typical'"):
        Engine(target, verifier="typicle")
    with pytest.raises(OutpaceError, match="verifier='block' verifies chains, but Lookahead drafts trees"):
        Engine(target, LOOKAHEAD, verifier="block")
    with pytest.raises(OutpaceError, match="'gpt2' is not a GGUF file"):
        Engine("gpt2")


def test_a_generation_is_not_to_be_had_too_early(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target)
    sequence = engine.add([1], SamplingParams(max_new_tokens=2))
    with pytest.raises(OutpaceError, match="still being decoded"):
        sequence.generation()


def test_a_drafter_gets_the_hidden_states_it_asks_for(target: outpace.targets.TargetModel) -> None:
    seen: list[Step] = []

    class Reader(NoDraft):
        def hidden_layers(self, shared: None) -> tuple[int, ...]:
            return (1,)

        def propose(self, states: Sequence[None]) -> list[Draft]:
            return [chain([7, 8]) for _ in states]

        def observe(self, states: Sequence[None], steps: Sequence[Step]) -> None:
            seen.extend(steps)

    found = Engine(target, Reader(), adaptive=False).generate([PROMPTS[0]], SamplingParams(max_new_tokens=4))[
        0
    ]
    text = torch.tensor([PROMPTS[0] + found.tokens[:1]])
    with torch.inference_mode():
        states = tiny_llama()(text, output_hidden_states=True).hidden_states[1][0]
    # The first step is plain: the drafter needs the hidden states of the prompt in the same forward.
    assert [step.hidden[1].shape for step in seen[:2]] == [(1, 32), (3, 32)]
    assert torch.allclose(seen[0].hidden[1][0], states[len(PROMPTS[0]) - 1])
    assert torch.allclose(seen[1].hidden[1][0], states[len(PROMPTS[0])])


def test_an_error_while_joining_leaks_no_slot(
    target: outpace.targets.TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, LOOKAHEAD, slots=4, adaptive=False)
    allocate, calls = engine._batch.cache.allocate, 0

    def fail_at_the_third(rows: int = 0) -> Slot:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room")
        return allocate(rows)

    monkeypatch.setattr(engine._batch.cache, "allocate", fail_at_the_third)
    waiting = [engine.add(prompt, SamplingParams(max_new_tokens=8)) for prompt in PROMPTS]
    while engine.sequences:
        engine.step()
    assert [sequence.finish_reason for sequence in waiting] == ["length", "length", "error"]
    assert isinstance(waiting[2].error, MemoryError)
    assert [s.output for s in waiting[:2]] == [stock(prompt, 8) for prompt in PROMPTS[:2]]
    assert len(engine._batch.cache) == 0
    for _ in range(2):
        found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
        assert [g.tokens for g in found] == [stock(prompt, 8) for prompt in PROMPTS]


def test_two_streams_share_an_engine(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target, LOOKAHEAD, adaptive=False)
    first = engine.stream(PROMPTS[0], SamplingParams(max_new_tokens=12))
    second = engine.stream(PROMPTS[2], SamplingParams(max_new_tokens=12))
    one, two = [next(first)], [next(second)]
    one += list(first)
    two += list(second)
    for found, prompt in ((one, PROMPTS[0]), (two, PROMPTS[2])):
        assert [token.token for token in found] == stock(prompt, 12)
        alone = list(
            Engine(target, LOOKAHEAD, adaptive=False).stream(prompt, SamplingParams(max_new_tokens=12))
        )
        assert [token.step for token in found] == [token.step for token in alone]


def test_a_stream_that_never_started_leaves_nothing(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target)
    engine.stream(PROMPTS[0]).close()  # type: ignore[attr-defined]
    assert not engine.sequences


def test_removing_a_sequence_of_another_engine_does_nothing(target: outpace.targets.TargetModel) -> None:
    engine = Engine(target)
    sequence = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=2))
    Engine(target).remove(sequence)
    assert sequence.finish_reason is None


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple])
def test_a_prompt_may_be_any_sequence_of_integers(
    target: outpace.targets.TargetModel, kind: Callable[[list[int]], Sequence[int]]
) -> None:
    plain, other = (
        Engine(target, "prompt_lookup", adaptive=False).generate([p], SamplingParams(max_new_tokens=16))[0]
        for p in (PROMPTS[2], kind(PROMPTS[2]))
    )
    assert (other.tokens, other.stats.drafted) == (plain.tokens, plain.stats.drafted)


@pytest.mark.parametrize("prompts", [[1, 2, 3], ["text"], [[1.5]]])
def test_what_is_no_prompt_is_refused(target: outpace.targets.TargetModel, prompts: list[Any]) -> None:
    with pytest.raises(OutpaceError, match="a prompt must be a list of token ids"):
        Engine(target).generate(prompts)


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token", [-1, 97])
def test_token_ids_in_parameters_are_checked(
    target: outpace.targets.TargetModel, name: str, token: int
) -> None:
    value = {token: 1.0} if name == "logit_bias" else [token]
    with pytest.raises(OutpaceError, match=f"{name}: token {token} is outside"):
        Engine(target).generate([[1]], SamplingParams(**{name: value}))  # type: ignore[arg-type]


def test_a_static_cache_is_a_limit() -> None:
    engine = Engine(outpace.Target(tiny_llama(), static=True), LOOKAHEAD, slots=2, length=24, adaptive=False)
    found = engine.generate([PROMPTS[0], PROMPTS[2]], SamplingParams(max_new_tokens=100))
    assert [g.tokens for g in found] == [stock(p, 100)[: 25 - len(p)] for p in (PROMPTS[0], PROMPTS[2])]
    with pytest.raises(OutpaceError, match="25 tokens, a slot of the static cache 24 rows"):
        engine.generate([[7] * 25])


def test_a_made_target_takes_no_options(target: outpace.targets.TargetModel) -> None:
    with pytest.raises(OutpaceError, match="static"):
        outpace.Target(target, static=True)


@pytest.mark.parametrize("drafter", ["suffix", LOOKAHEAD])
def test_room_is_given_back_and_made_anew(target: outpace.targets.TargetModel, drafter: str) -> None:
    engine, plain = Engine(target, drafter, length=64, adaptive=False), Engine(target)
    expected = [one.tokens for one in plain.generate(PROMPTS, SAMPLED)]
    assert engine.room == (1, 64)
    for room in ((1, 1), (4, 200), (2, 8)):
        engine.make_room(*room)
        assert engine.room == room
        assert [one.tokens for one in engine.generate(PROMPTS, SAMPLED)] == expected
    sequence = engine.add(PROMPTS[0], SAMPLED)
    engine.step()
    with pytest.raises(OutpaceError, match="their rows are in the cache; remove them first"):
        engine.make_room(1, 1)
    while sequence.finish_reason is None:
        engine.step()
    assert sequence.output == expected[0]
