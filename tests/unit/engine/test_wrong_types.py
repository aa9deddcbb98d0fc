"""Prompts, parameters and processors of the wrong type: an error that names them, and others go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import outpace
from models import tiny_llama
from outpace import Engine, OutpaceError, SamplingParams, Target
from parts import described

PROMPT = [3, 6, 7, 11]
WRONG_PROMPTS: list[Any] = [
    [True, False],
    [1, True],
    torch.tensor([True, False]),
    np.array([True, False]),
    b"ab",
    bytearray(b"ab"),
    memoryview(b"ab"),
    {1: 2, 3: 4},
    {1, 2},
    frozenset([1]),
    "ab",
    [1.0, 2.0],
    ["1"],
    [[1, 2]],
    [None],
    5,
    None,
    torch.tensor([1.0]),
    [1, 2**70],
    [-1],
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Target(tiny_llama().double(), check=False), "none")


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=described)
def test_what_is_no_list_of_token_ids(prompt: Any, engine: Engine) -> None:
    for work in (lambda: engine.add(prompt), lambda: engine.add(PROMPT, output=prompt)):
        with pytest.raises(OutpaceError, match=r"prompt must be a list|outside the model's vocabulary"):
            work()
    with pytest.raises(OutpaceError):
        engine.generate([prompt])
    assert not engine.sequences


def test_integers_of_other_libraries_are_token_ids(engine: Engine) -> None:
    params = SamplingParams(4)
    expected = engine.generate([PROMPT], params)[0].tokens
    for prompt in (tuple(PROMPT), np.array(PROMPT), torch.tensor(PROMPT), map(int, PROMPT)):
        sequence = engine.add(prompt, params)  # type: ignore[arg-type]
        while sequence.finish_reason is None:
            engine.step()
        assert sequence.generation().tokens == expected
    bias = SamplingParams(4, logit_bias={np.int64(9): np.float32(1e9)})
    assert engine.generate([PROMPT], bias)[0].tokens == [9] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {"0": 1}},
        {"logit_bias": {True: 1}},
        {"logit_bias": {0.5: 1}},
        {"logit_bias": {0: "a"}},
        {"logit_bias": {0: None}},
        {"logit_bias": {0: float("nan")}},
        {"logit_bias": [1, 2]},
        {"logit_bias": "ab"},
        {"logit_bias": 5},
        {"stop_token_ids": [True]},
        {"stop_token_ids": ["0"]},
        {"stop_token_ids": 5},
        {"logits_processors": [1]},
        {"logits_processors": "ab"},
        {"logits_processors": {"a": 1}},
        {"logits_processors": TemperatureLogitsWarper(2.0)},
    ],
    ids=described,
)
def test_parameters_of_the_wrong_type(options: Any) -> None:
    with pytest.raises(OutpaceError) as error:
        SamplingParams(**options)
    assert "\n" not in str(error.value)


def test_token_ids_in_no_vocabulary(engine: Engine) -> None:
    with pytest.raises(OutpaceError, match="logit_bias: token 97 is outside"):
        engine.add(PROMPT, SamplingParams(logit_bias={97: 1.0}))


WRONG_SCORES: dict[str, Any] = {
    "None": lambda ids, scores: None,
    "float": lambda ids, scores: 1.0,
    "numpy": lambda ids, scores: scores.numpy(),
    "one row": lambda ids, scores: scores[0],
    "too short": lambda ids, scores: scores[:, :-1],
    "too long": lambda ids, scores: torch.cat([scores, scores], dim=-1),
    "two rows": lambda ids, scores: scores.expand(2, -1),
    "integers": lambda ids, scores: scores.long(),
    "tuple": lambda ids, scores: (scores,),
}


@pytest.mark.parametrize("kind", WRONG_SCORES)
def test_processors_that_return_something_else(kind: str, engine: Engine) -> None:
    """The one request ends with an error that names what came; the other has its tokens."""
    expected = engine.generate([PROMPT], SamplingParams(4))[0].tokens
    wrong = engine.add(PROMPT, SamplingParams(4, logits_processors=[WRONG_SCORES[kind]]))
    other = engine.add(PROMPT, SamplingParams(4))
    while other.finish_reason is None or wrong.finish_reason is None:
        engine.step()
    assert other.generation().tokens == expected
    assert wrong.finish_reason == "error"
    with pytest.raises(OutpaceError, match=r"logits processor .*lambda.* returned .*must return scores like"):
        engine.generate([PROMPT], SamplingParams(4, logits_processors=[WRONG_SCORES[kind]]))


def test_a_processor_of_an_accelerated_model_is_named_too() -> None:
    model = outpace.accelerate(tiny_llama().double(), "lookahead", plan="stock")
    with pytest.raises(OutpaceError, match=r"logits processor .*lambda.* returned NoneType"):
        model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=4,
            logits_processor=LogitsProcessorList([WRONG_SCORES["None"]]),
        )


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (list(range(10**6)), "1000000 end tokens"),
        (["2"], "no token id"),
        ([True], "no token id"),
        (2.5, "no token id"),
    ],
)
def test_end_tokens_that_are_none(ends: Any, words: str) -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = ends
    with pytest.raises(OutpaceError, match=words):
        Target(model, check=False)
