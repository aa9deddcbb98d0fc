"""A sequence resumed from earlier output has the tokens of an uninterrupted one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget

PROMPT = [3, 4, 5]
SAMPLED = SamplingParams(max_new_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
PARAMS = [
    SamplingParams(max_new_tokens=30),
    SAMPLED,
    replace(SAMPLED, repetition_penalty=1.3),
    replace(SAMPLED, presence_penalty=0.8, frequency_penalty=0.3),
    replace(SAMPLED, stop=(" 21 10",), seed=8),
]


class Numbers:
    """A tokenizer whose text is the token ids in digits."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f" {token}" for token in token_ids)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("drafter", [None, "prompt_lookup", "lookahead:window=3,ngram=3"])
def test_output_goes_on_as_if_it_had_not_stopped(drafter: Any, params: SamplingParams) -> None:
    engine = Engine(ToyTarget(), drafter, tokenizer=Numbers(), adaptive=False)
    (whole,) = Engine(ToyTarget(), tokenizer=Numbers()).generate([PROMPT], params)
    for there in (0, 1, 7, len(whole.tokens) - 1):
        sequence = engine.add(PROMPT, params, output=whole.tokens[:there])
        while sequence.finish_reason is None:
            engine.step()
        found = sequence.generation()
        assert (found.tokens, found.text, found.finish_reason) == (
            whole.tokens,
            whole.text,
            whole.finish_reason,
        )
        assert found.stats.tokens == len(whole.tokens) - there
        assert sequence.steps[:there] == [0] * there


def test_two_lengths_join_together() -> None:
    engine = Engine(ToyTarget(), "prompt_lookup")
    (whole,) = Engine(ToyTarget()).generate([PROMPT], SAMPLED)
    sequences = [engine.add(PROMPT, SAMPLED, output=whole.tokens[:there]) for there in (12, 2)]
    while engine.sequences:
        engine.step()
    assert [sequence.output for sequence in sequences] == [whole.tokens] * 2


def test_output_that_is_complete_has_ended() -> None:
    engine = Engine(ToyTarget(context=20), tokenizer=Numbers())
    params = SamplingParams(max_new_tokens=4, stop=(" 7 8",))
    assert engine.add(PROMPT, params, output=[1, 2, 3, 4]).finish_reason == "length"
    assert engine.add(PROMPT, replace(params, max_new_tokens=99), output=[1] * 18).finish_reason == "length"
    stopped = engine.add(PROMPT, params, output=[7, 8])
    assert (stopped.finish_reason, stopped.generation().text) == ("stop", "")


@pytest.mark.parametrize(("output", "reason"), [([99], "token 99"), ("text", "list of token ids")])
def test_output_must_be_token_ids(output: Any, reason: str) -> None:
    with pytest.raises(OutpaceError, match=reason):
        Engine(ToyTarget()).add(PROMPT, output=output)
