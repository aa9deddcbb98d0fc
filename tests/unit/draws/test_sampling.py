"""Processing of logits and keyed noise."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outpace.core import OutpaceError, SamplingParams
from outpace.draws.noise import Key, Stream, _mix_words, gumbel, key, mix, noisy_argmax, signed, uniform
from outpace.draws.own_tokens import guess
from outpace.draws.sampling import Processor, warp

CPU = torch.device("cpu")


def _rows(count: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_the_hash_is_splitmix64() -> None:
    # First outputs of splitmix64 from state 0, as published with the generator.
    state, found = 0, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        found.append(mix(state))
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_tensors_are_hashed_as_integers_are() -> None:
    words = [0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 12345678901234567890]
    hashed = _mix_words(torch.tensor([signed(w) for w in words]))
    assert hashed.tolist() == [signed(mix(w)) for w in words]


def test_keys_differ_by_every_bit_of_the_seed_and_by_every_word() -> None:
    keys = {key(seed, *words) for seed in (0, 1, 2**32, 2**63) for words in ((), (0,), (1,), (0, 1), (1, 0))}
    assert len(keys) == 20


def test_noise_of_some_tokens_is_the_noise_of_all_at_those_tokens() -> None:
    tokens = torch.tensor([3, 11, 40])
    assert torch.equal(gumbel(7, 50, CPU)[tokens], gumbel(7, 50, CPU, tokens))


def test_noise_is_standard_gumbel() -> None:
    noise = torch.cat([gumbel(key(seed), 1000, CPU) for seed in range(50)])
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-4


def test_noise_of_neighbouring_keys_is_independent() -> None:
    first = torch.cat([gumbel(key(1, Stream.TARGET, i), 1000, CPU) for i in range(50)])
    second = torch.cat([gumbel(key(1, Stream.TARGET, i + 1), 1000, CPU) for i in range(50)])
    assert stats.pearsonr(first.numpy(), second.numpy()).pvalue > 1e-4


def test_uniform_is_uniform() -> None:
    values = [uniform(key(3, i)) for i in range(20_000)]
    assert min(values) > 0 and max(values) < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-4


def test_noisy_argmax_draws_from_the_softmax() -> None:
    scores = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    counts = torch.zeros(4)
    for i in range(20_000):
        counts[noisy_argmax(scores, key(5, i))] += 1
    expected = scores.softmax(0) * 20_000
    assert counts[2] == 0
    seen = [0, 1, 3]
    assert stats.chisquare(counts[seen].numpy(), expected[seen].numpy(), sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
def test_a_row_without_a_token_is_an_error(bad: float) -> None:
    with pytest.raises(OutpaceError, match="every token is excluded"):
        noisy_argmax(torch.full((4,), bad), 1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_k": 1000},
    ],
)
def test_warp_is_transformers_warpers(options: dict[str, float]) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    theirs = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        theirs.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        theirs.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        theirs.append(MinPLogitsWarper(params.min_p))
    rows = _rows(50, 64)
    assert torch.equal(warp(rows, params), theirs(torch.zeros(50, 1, dtype=torch.long), rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("step", [0.0, 0.5, 100.0], ids=["no ties", "ties", "all equal"])
def test_top_p_of_many_tokens_is_transformers_warper(step: float, top_p: float, dtype: torch.dtype) -> None:
    """The tokens kept are those of transformers, also if the boundary divides equal scores."""
    rows = _rows(8, 20_000).to(dtype)
    rows = (rows / step).round() * step if step else rows
    rows[1, 100:] = -torch.inf
    rows[2, 1:] = -torch.inf
    rows[3, 5] = torch.nan
    expected = TopPLogitsWarper(top_p)(torch.zeros(8, 1, dtype=torch.long), rows)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    for found in (warp(rows, params), torch.stack([warp(row, params) for row in rows])):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))  # of NaN, too


def test_warp_leaves_its_input() -> None:
    rows = _rows(3, 16)
    before = rows.clone()
    warp(rows, SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1))
    assert torch.equal(rows, before)


def test_repetition_penalty_counts_prompt_and_output() -> None:
    processor = Processor(SamplingParams(repetition_penalty=1.7), [1, 2, 2])
    processor.observe(5)
    row = _rows(1, 16)[0]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 2, 5]]), row[None].clone())[0]
    assert torch.equal(processor(row, [1, 2, 2, 5]), theirs)


@pytest.mark.parametrize("repetition", [1.0, 1.7])  # of which the prompt's tokens are known
def test_presence_and_frequency_count_the_output_only(repetition: float) -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=repetition)
    processor = Processor(params, [1, 2])
    for token in (3, 3, 4):
        processor.observe(token)
    change = processor(torch.zeros(6), [1, 2, 3, 3, 4])
    assert change.tolist() == [0, 0, 0, -1.0, -0.75, 0]


def test_guessed_tokens_are_penalised_like_emitted_ones() -> None:
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    row = _rows(1, 16)[0]
    guessing, emitted = Processor(params, [1, 2]), Processor(params, [1, 2])
    for token in (7, 7, 9):
        emitted.observe(token)
    assert torch.equal(guessing.adjust(row, [7, 7, 9]), emitted.adjust(row))


def test_the_order_is_bias_penalties_processors_temperature() -> None:
    seen: list[torch.Tensor] = []

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.tolist() == [[1, 2]]
        seen.append(scores.clone())
        return scores + 1

    params = SamplingParams(
        temperature=2.0, repetition_penalty=2.0, logit_bias={1: 3.0}, logits_processors=[processor]
    )
    found = Processor(params, [1, 2])(torch.zeros(4), [1, 2])
    assert seen[0].tolist() == [[0, 1.5, 0, 0]]
    assert found.tolist() == [0.5, 1.25, 0.5, 0.5]


def test_processors_get_a_copy_of_the_row() -> None:
    def spoil(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(0)

    row = _rows(1, 8)[0]
    before = row.clone()
    Processor(SamplingParams(logits_processors=[spoil]), [1])(row, [1])
    assert torch.equal(row, before)


def test_rows_are_drawn_as_the_target_draws_them() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9)
    rows, seed_key = _rows(40, 64), Key(11)
    indices = [i % 7 for i in range(40)]
    drawn = guess(rows, indices, params, seed_key)
    one_by_one = [
        noisy_argmax(Processor(params, [1])(row, [1]), seed_key.target(i))
        for row, i in zip(rows, indices, strict=True)
    ]
    assert drawn == one_by_one
    assert guess(rows, indices, SamplingParams(), seed_key) == rows.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", 1e39),  # which float32 does not have
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", 1e-39),
        ("presence_penalty", float("nan")),
        ("presence_penalty", -1e39),
        ("frequency_penalty", float("inf")),
        ("frequency_penalty", 1e39),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 1e39}),
        ("logit_bias", {1: float("inf")}),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", [""]),
        ("logprobs", -1),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(OutpaceError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"top_k": 2.5}, {"temperature": "hot"}, {"max_new_tokens": None}, {"seed": 0.5}]
)
def test_a_parameter_of_the_wrong_type_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(OutpaceError, match="wrong type"):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_numbers_of_other_libraries_and_none_are_taken() -> None:
    params = SamplingParams(seed=torch.tensor(3), top_k=torch.tensor(5), stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert (params.seed, params.top_k, params.stop, params.stop_token_ids) == (3, 5, (), ())
    assert type(params.seed) is int


def test_a_token_of_infinite_score_is_the_only_choice() -> None:
    scores = torch.tensor([1.0, torch.inf, 2.0])
    assert {noisy_argmax(scores, key(seed)) for seed in range(20)} == {1}


@pytest.mark.parametrize("temperature", [1e-4, 1e-38, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    scores = warp(torch.tensor([5.0, 1.0, 0.5, -7.0]), SamplingParams(temperature=temperature, top_p=0.9))
    assert {noisy_argmax(scores, key(seed)) for seed in range(20)} == {0}


def test_uniform_is_below_one_at_its_largest() -> None:
    assert uniform(0) > 0 and uniform(2**64 - 1) < 1
