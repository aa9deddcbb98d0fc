"""``SamplingParams.structured_outputs``: what it allows, and plain decoding's tokens with every drafter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from outpace.core import OutpaceError, SamplingParams, StructuredOutputs
from outpace.engine.engine import Engine
from serving import PERSON, model

PATTERN = r"([a-c]{2,4}/\d{2},)+"
GBNF = 'root ::= "(" root ")" | "[" root root "]" | [a-c]{1,3} "."'
SHAPES: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": PERSON}, json.loads),
    ({"json": json.dumps(PERSON)}, json.loads),
    ({"regex": PATTERN}, lambda text: re.fullmatch(PATTERN, text)),
    ({"choice": ["grün", '"red"', "red and green"]}, lambda text: text in ("grün", '"red"', "red and green")),
    ({"grammar": GBNF}, lambda text: text.count("(") == text.count(")") and "." in text),
    ({"grammar": "start: /[a-c]{2,5}\\./"}, lambda text: re.fullmatch(r"[a-c]{2,5}\.", text)),
]
PROMPTS = ("Once upon a time", "ab/12,ab/12,ab/12,")


def engine(drafter: str) -> Engine:
    return Engine(model().target, drafter, tokenizer=model().tokenizer, slots=3)


@lru_cache
def plain(place: int, seed: int | None) -> list[list[int]]:
    """The tokens of plain decoding, one prompt at a time."""
    params = shaped(place, seed)
    return [engine("none").generate([model().tokens(text)], params)[0].tokens for text in PROMPTS]


def shaped(place: int, seed: int | None) -> SamplingParams:
    how = {} if seed is None else {"temperature": 1.0, "seed": seed}
    return SamplingParams(max_new_tokens=16, structured_outputs=SHAPES[place][0], **how)


@pytest.mark.parametrize("drafter", ["suffix", "combined:(suffix)+(token_recycling)"])
def test_every_draft_is_of_the_constraints_tokens(drafter: str) -> None:
    drafted, ended = engine(drafter), 0
    for place, (wanted, holds) in enumerate(SHAPES):
        for seed in (None, 5):
            found = drafted.generate([model().tokens(text) for text in PROMPTS], shaped(place, seed))
            assert [one.tokens for one in found] == plain(place, seed), wanted
            for one in found:
                if one.finish_reason != "length":
                    ended += 1
                    assert holds(one.text or ""), (wanted, one.text)
    assert ended > 12


def test_prompts_of_one_batch_have_their_own_constraints() -> None:
    prompts = [model().tokens(text) for text in (*PROMPTS, "The dog")]
    params = [SamplingParams(max_new_tokens=9, structured_outputs={"regex": rf"{one}{{3}}"}) for one in "xyz"]
    assert [one.text for one in engine("suffix").generate(prompts, params)] == ["xxx", "yyy", "zzz"]


def test_it_goes_with_criteria_and_processors() -> None:
    prompt = model().tokens("Once")
    params = SamplingParams(max_new_tokens=20, structured_outputs={"regex": "[ab]+"}, ignore_eos=True)
    one = engine("none").add(prompt, params, criteria=lambda tokens: len(tokens) >= len(prompt) + 3)
    assert one.params.max_new_tokens == 20
    calls = list[int]()

    def processor(ids: Any, scores: Any) -> Any:
        calls.append(int((scores[0] > float("-inf")).sum()))
        return scores

    both = SamplingParams(
        max_new_tokens=4, structured_outputs={"regex": "[ab]{4}"}, logits_processors=[processor]
    )
    (found,) = engine("suffix").generate([prompt], both)
    assert re.fullmatch("[ab]{4}", found.text or "") and max(calls) < 40


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "not none of them"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice"),
    ({"regex": "(?=a)"}, "look-around"),
    ({"regex": "a\\"}, "backslash"),
    ({"choice": [""]}, "not empty"),
    ({"choice": "a", "regex": ""}, ""),
    ({"json": "nope"}, "no JSON object"),
    ({"json": "[1]"}, "no JSON object"),
    ({"json": {"type": "nothing"}}, "nothing"),
    ({"grammar": "root ::= x"}, "no rule x"),
    ({"grammar": "start: x"}, "unknown name"),
    ({"regex": 5}, "must be a text"),
]


@pytest.mark.parametrize(("wanted", "said"), WRONG)
def test_what_is_wrong_is_named(wanted: dict[str, Any], said: str) -> None:
    if not said:  # a text alone is the only choice
        params = SamplingParams(structured_outputs=wanted)
        assert engine("none").generate([model().tokens("Once")], params)[0].text == "a"
        return
    with pytest.raises(OutpaceError, match=re.escape(said)):
        engine("none").generate([model().tokens("Once")], SamplingParams(structured_outputs=wanted))


def test_what_it_needs_and_does_not_go_with() -> None:
    wanted = StructuredOutputs(regex="a")
    with pytest.raises(OutpaceError, match="need a tokenizer"):
        Engine(model().target).generate([[5]], SamplingParams(structured_outputs=wanted))
    with pytest.raises(OutpaceError, match="min_tokens must be 0 with structured_outputs"):
        SamplingParams(structured_outputs=wanted, min_tokens=1)
