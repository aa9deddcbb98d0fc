"""Stopping criteria: those that the engine evaluates itself, and those that are called."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import outpace
from outpace.targets.inputs.config import CACHE
from parts import in_turn
from unit.hf.tiny import NEVER, make

N, E = ord("n"), ord("e")


class After(StoppingCriteria):
    """Ends a row at its k-th token of a kind; notes what it is shown."""

    def __init__(self, token: int = E, count: int = 3) -> None:
        self.token, self.count = token, count
        self.scores: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.scores.append(scores)
        return (input_ids[:, 15:] == self.token).sum(dim=1) >= self.count


class EndsAtE(EosTokenCriteria):
    """A subclass: it decides by its own rule."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == E


def test_criteria_equal_stock(plain: Any, fast: Any, batch: Any) -> None:
    cases: dict[str, list[Any]] = {
        "after": [After()],
        "after, in step": [After(E, 1)],
        "two": [After(E, 4), After(N, 5)],
        "length": [MaxLengthCriteria(24)],
        "a length before the prompt's": [MaxLengthCriteria(3)],
        "eos": [EosTokenCriteria([N, E])],
        "subclass of eos": [EndsAtE(NEVER)],
    }
    lengths = set()
    for name, criteria in cases.items():
        for eos in ({}, {"eos_token_id": NEVER}, {"eos_token_id": N}):
            options = {"max_new_tokens": 40, **eos, "stopping_criteria": StoppingCriteriaList(criteria)}
            expected = plain.generate(**batch, **options)
            assert fast.generate(**batch, **options).tolist() == expected.tolist(), (name, eos)
            lengths.add(expected.shape[1])
    assert len(lengths) > 3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_grow_on_where_there_is_no_end_token(family: str, batch: Any) -> None:
    """Without an end-of-sequence token transformers pads nothing: every row grows until all have ended."""
    model = make(family)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    asked = {"return_dict_in_generate": True, "output_logits": True}
    options = {"max_new_tokens": 60, "stopping_criteria": StoppingCriteriaList([After(E, 3)])}
    expected = model.generate(**batch, **options, **asked)
    outpace.accelerate(model, "lookahead:window=3,ngram=3,guesses=3")
    found = model.generate(**batch, **options, **asked)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert 16 < expected.sequences.shape[1] < 75
    for ours, stock in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, stock)
    assert found[CACHE].get_seq_length() == expected.sequences.shape[1] - 1


def test_criteria_get_scores_if_they_are_asked_for(fast: Any, one: Any) -> None:
    after = After(count=99)
    options = {"max_new_tokens": 5, "stopping_criteria": StoppingCriteriaList([after])}
    fast.generate(**one, **options)
    assert after.scores == [None] * 5
    after.scores.clear()
    found = fast.generate(**one, **options, return_dict_in_generate=True, output_scores=True)
    assert [len(scores) for scores in after.scores] == [1, 2, 3, 4, 5]
    torch.testing.assert_close(after.scores[-1], found.scores)


def test_max_time(fast: Any, one: Any) -> None:
    began = time.monotonic()
    found = fast.generate(**one, max_new_tokens=200, eos_token_id=NEVER, max_time=0.05)
    assert time.monotonic() - began < 5
    assert one["input_ids"].shape[1] < found.shape[1] < one["input_ids"].shape[1] + 200


STOPS = ["ne", "oi", "s\n", "ei", "eeee", ["ae", "nn"], " "]


@pytest.mark.parametrize(("stops", "plain"), in_turn(STOPS, ["llama", "gpt2"]), indirect=["plain"])
def test_stop_strings_equal_stock(stops: Any, plain: Any, fast: Any, batch: Any, tokenizer: Any) -> None:
    options = {"max_new_tokens": 50, "stop_strings": stops, "tokenizer": tokenizer}
    expected = plain.generate(**batch, **options)
    assert fast.generate(**batch, **options).tolist() == expected.tolist()


def test_some_stop_string_stops(plain: Any, batch: Any, tokenizer: Any) -> None:
    outputs = {
        str(plain.generate(**batch, max_new_tokens=50, stop_strings=stops, tokenizer=tokenizer).tolist())
        for stops in STOPS
    }
    assert len(outputs) > 4


def test_stop_strings_of_a_config(plain: Any, fast: Any, one: Any, tokenizer: Any) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=50, stop_strings=["e"])
    expected = plain.generate(**one, generation_config=config, tokenizer=tokenizer)
    assert fast.generate(**one, generation_config=config, tokenizer=tokenizer).tolist() == expected.tolist()
    assert config.stop_strings == ["e"]
    assert expected.shape[1] < one["input_ids"].shape[1] + 50


def test_stop_strings_of_the_model(one: Any, tokenizer: Any) -> None:
    model = make("llama")
    model.generation_config.stop_strings = ["o"]
    expected = model.generate(**one, max_new_tokens=50, tokenizer=tokenizer)
    outpace.accelerate(model)
    assert model.generate(**one, max_new_tokens=50, tokenizer=tokenizer).tolist() == expected.tolist()
    assert model.generation_config.stop_strings == ["o"]
    assert expected.shape[1] < one["input_ids"].shape[1] + 50


def test_a_stop_string_criterion_of_the_callers_goes_first(
    plain: Any, fast: Any, one: Any, tokenizer: Any
) -> None:
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, ["n"])])
    options = {"max_new_tokens": 50, "stop_strings": ["e"], "tokenizer": tokenizer}
    expected = plain.generate(**one, **options, stopping_criteria=criteria)
    assert fast.generate(**one, **options, stopping_criteria=criteria).tolist() == expected.tolist()


def test_stop_strings_without_a_tokenizer(plain: Any, fast: Any, one: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        fast.generate(**one, max_new_tokens=5, stop_strings="e")
    # decode(): a callable gets none, as its docstring says.
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        custom = outpace.decode("none")
        plain.generate(**one, max_new_tokens=5, stop_strings="e", tokenizer=tokenizer, custom_generate=custom)


def test_a_batch_needs_a_pad_token_to_end_apart(batch: Any) -> None:
    model = make("llama")
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    outpace.accelerate(model, "none")
    criteria = StoppingCriteriaList([EosTokenCriteria(E)])
    with pytest.raises(outpace.OutpaceError, match="pass pad_token_id"):
        model.generate(**batch, max_new_tokens=9, stopping_criteria=criteria)
