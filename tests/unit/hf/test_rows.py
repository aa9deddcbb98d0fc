"""What processors and criteria of a row are given, and the warpers that the engine takes over."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outpace.core import SamplingParams
from outpace.draws.sampling import warp
from outpace.hf.rows import GenerateRow, Recording, split_warpers

PENALTY = RepetitionPenaltyLogitsProcessor(1.2)
TEMPERATURE, TOP_K = TemperatureLogitsWarper(0.7), TopKLogitsWarper(9)
TOP_P, MIN_P = TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)


def test_processors_and_criteria_see_the_pads_and_each_criterion_is_called() -> None:
    seen: dict[str, list[Any]] = {"processor": [], "first": [], "second": []}

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen["processor"].append(input_ids.tolist())
        return scores

    def criterion(name: str) -> Any:
        return lambda input_ids, scores: seen[name].append(input_ids.tolist()) or True

    prompt, criteria = torch.tensor([9, 9, 3, 4]), [criterion("first"), criterion("second")]
    row = GenerateRow(prompt, 2, SamplingParams(), [processor], criteria, 5, Recording(None, None))
    row.params.logits_processors[0](torch.tensor([[3, 4]]), torch.zeros(1, 8))
    assert row.ends([3, 4, 5])
    assert seen == {
        "processor": [[[9, 9, 3, 4]]],
        "first": [[[9, 9, 3, 4, 5]]],
        "second": [[[9, 9, 3, 4, 5]]],
    }


def test_those_at_the_end_are_taken_in_the_engines_order() -> None:
    assert split_warpers([]) == ([], {})
    assert split_warpers([PENALTY]) == ([PENALTY], {})
    assert split_warpers([PENALTY, TEMPERATURE, TOP_K, TOP_P, MIN_P]) == (
        [PENALTY],
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    )
    assert split_warpers([TEMPERATURE, TOP_P]) == ([], {"temperature": 0.7, "top_p": 0.9})
    assert split_warpers([TOP_P, TEMPERATURE]) == ([TOP_P], {"temperature": 0.7})
    assert split_warpers([TOP_K, TOP_K]) == ([TOP_K], {"top_k": 9})
    assert split_warpers([TEMPERATURE, PENALTY]) == ([TEMPERATURE, PENALTY], {})
    assert split_warpers([TEMPERATURE, LogitNormalization()])[1] == {}


def test_those_that_do_otherwise_are_left() -> None:
    class Mine(TopKLogitsWarper):
        pass

    others: list[Any] = [
        TopKLogitsWarper(3, filter_value=-5.0),
        TopPLogitsWarper(0.9, filter_value=-5.0),
        TopPLogitsWarper(0.9, min_tokens_to_keep=2),
        MinPLogitsWarper(0.1, min_tokens_to_keep=2),
        TopPLogitsWarper(0.0),
        Mine(3),
    ]
    for other in others:
        assert split_warpers([TEMPERATURE, other]) == ([TEMPERATURE, other], {})


def test_the_engine_does_the_same() -> None:
    torch.manual_seed(0)
    warpers = [TEMPERATURE, TopKLogitsWarper(3, min_tokens_to_keep=20), TOP_P, MIN_P]
    for end in range(1, 5):
        rest, found = split_warpers(warpers[:end])
        assert not rest
        expected = scores = torch.randn(50, 259) * 4
        for warper in warpers[:end]:
            expected = warper(torch.zeros(50, 1, dtype=torch.long), expected)
        assert torch.equal(warp(scores, SamplingParams(**{"temperature": 1.0} | found)), expected)
