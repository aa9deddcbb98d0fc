"""Ends of outputs by vLLM's rules for ``stop``, ``stop_token_ids``, ``ignore_eos`` and ``min_tokens``."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from outpace.core import OutpaceError, SamplingParams, StoppedBy
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget

PROMPT = [3, 4, 5]
END = 0  # the toy's end-of-sequence token
ENDLESS = SamplingParams(max_new_tokens=24, ignore_eos=True, logit_bias={END: -100})
DRAFTERS = ["none", "prompt_lookup", "lookahead:window=3,ngram=3", "reference"]


class Letters:
    """A tokenizer of texts of one or two characters, so that stop strings begin and end inside tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token % 7) + ("-" if token % 3 else "") for token in token_ids)


TEXT = Letters().decode


def decode(params: SamplingParams, drafter: str = "none", verifier: str = "match") -> Any:
    engine = Engine(ToyTarget(), drafter, verifier, Letters(), adaptive=False)
    told = [plain().tokens] if drafter == "reference" else []
    (found,) = engine.generate([PROMPT], params, references=[told] if told else None)
    return found


@cache
def plain() -> Any:
    return decode(ENDLESS)


def ended(tokens: list[int], stops: list[str], least: int) -> tuple[int, str, StoppedBy]:
    """Number of tokens, text and end by the rule: the first stop string that a later token completes."""
    for count in range(least + 1, len(tokens) + 1):
        whole, before = TEXT(tokens[:count]), len(TEXT(tokens[: count - 1]))
        for end in range(before + 1, len(whole) + 1):
            found = [stop for stop in stops if whole[:end].endswith(stop)]
            if found:
                longest = max(found, key=len)
                return count, whole[: end - len(longest)], StoppedBy("stop string", longest)
    return len(tokens), TEXT(tokens), StoppedBy("limit")


def stop_strings() -> list[list[str]]:
    """Stop strings inside a token, across several, one in another, two that end together, one never."""
    whole = TEXT(plain().tokens)
    one, several = whole[4], whole[3:8]
    return [[one], [several], [several[1:], several], [several, one], [several[-1], several], ["never"]]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("least", [0, 1, 3, 5, 12, 23, 24])
def test_stop_strings_end_an_output_after_the_fewest_tokens(least: int, drafter: str) -> None:
    tokens = plain().tokens
    for stops in stop_strings():
        found = decode(replace(ENDLESS, stop=stops, min_tokens=least), drafter)
        count, text, by = ended(tokens, stops, least)
        assert (found.tokens, found.text, found.stopped_by) == (tokens[:count], text, by), stops


def test_the_cases_are_different_ones_and_drafts_are_accepted() -> None:
    found = {ended(plain().tokens, stops, least)[:2] for stops in stop_strings() for least in (0, 3, 12)}
    assert len(found) >= 6
    assert decode(replace(ENDLESS, stop="never", min_tokens=12), "reference").stats.accepted > 10


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("least", [0, 1, 4, 5])
def test_no_token_ends_an_output_before(least: int, verifier: str) -> None:
    first = plain().tokens[0]
    for given, end, kind in (({}, END, "end token"), ({"stop_token_ids": [first]}, first, "stop token")):
        eager = SamplingParams(max_new_tokens=5, min_tokens=least, logit_bias={end: 100}, **given)
        found = decode(eager, "prompt_lookup", verifier)
        assert len(found.tokens) == min(least + 1, 5) and end not in found.tokens[:least]
        assert found.stopped_by.kind == ("limit" if least == 5 else kind)
        shown = found.tokens[:least]  # the token that ends an output is not in its text
        assert found.text == TEXT(shown)


def test_an_ignored_end_is_held_back_too_and_is_in_the_text() -> None:
    found = decode(SamplingParams(max_new_tokens=6, min_tokens=2, ignore_eos=True, logit_bias={END: 100}))
    assert END not in found.tokens[:2] and found.tokens[2:] == [END] * 4
    assert found.text == TEXT(found.tokens) and found.finish_reason == "length"


def test_a_token_that_ends_the_output_completes_no_stop_string() -> None:
    tokens = plain().tokens
    last = next(place for place, token in enumerate(tokens) if place and token not in tokens[:place])
    stop = TEXT(tokens[last - 1 : last + 1])
    found = decode(replace(ENDLESS, stop=stop, stop_token_ids=[tokens[last]], min_tokens=last))
    assert (found.tokens, found.text) == (tokens[: last + 1], TEXT(tokens[:last]))
    assert found.finish_reason == "stop"


def test_more_than_may_be_emitted_is_refused() -> None:
    for most, least in ((4, 5), (4, -1), (0, 1)):
        with pytest.raises(OutpaceError, match=f"min_tokens must be between 0 and max_new_tokens, {most}"):
            SamplingParams(max_new_tokens=most, min_tokens=least)
    with pytest.raises(OutpaceError, match=r"min_tokens is one.*verifier='match'"):
        decode(SamplingParams(min_tokens=1), verifier="block")
