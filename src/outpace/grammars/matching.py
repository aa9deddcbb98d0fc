"""The tokens that a grammar allows next, by llguidance, as a mask over the logits."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor

from outpace.core import OutpaceError, StructuredOutputs, first_line
from outpace.grammars.notations import Free, grammar_of
from outpace.transfer import upload

# Fuel and items of a mask are about 10 ms; a state takes 1 to 2 kB.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}


class Grammar:
    """A matcher for one sequence: its logits processor and its stopping criterion.

    Args:
        prompt_length: number of tokens before the output.
    """

    def __init__(self, matcher: llguidance.LLMatcher, prompt_length: int) -> None:
        self._matcher = matcher.deep_copy()
        self._read = prompt_length

    def _follow(self, new: list[int]) -> None:
        self._read += len(new)
        if new and not (self._matcher.is_stopped() or self._matcher.consume_tokens(new)):
            raise OutpaceError(f"the grammar cannot continue: {self._matcher.get_error().strip()}")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Exclude the tokens that the grammar does not allow next from scores [1, vocabulary]."""
        self._follow(input_ids[0, self._read :].tolist())
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise OutpaceError(f"the schema is too complex here: {self._matcher.get_error().strip()}")
        bits = np.frombuffer(mask, np.uint8)
        allowed = np.unpackbits(bits, count=scores.shape[-1], bitorder="little").astype(np.bool_)
        return scores.masked_fill(~upload(allowed, scores.device), -torch.inf)

    def ended(self, tokens: list[int]) -> bool:
        """True if the text is complete and nothing may follow it."""
        self._follow(tokens[self._read :])
        return bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """Tokens of the text that must follow, in the tokenizer's encoding."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())


class Constraints:
    """The grammars of requests for one tokenizer.

    Args:
        tokenizer: a fast transformers tokenizer, or a GGUF file's.
        vocabulary: number of logits per row.
        eos: the tokens that end an output.

    Raises:
        OutpaceError: llguidance does not know the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        found = tokenizer_of(tokenizer, vocabulary, sorted(eos))
        if isinstance(found, str):
            raise OutpaceError(f"this model's tokenizer supports no grammars: {found}")
        self._tokenizer = found
        self._latest: tuple[StructuredOutputs, llguidance.LLMatcher] | None = None

    def matcher(self, wanted: StructuredOutputs) -> llguidance.LLMatcher:
        """A matcher of the texts that are wanted; that of the latest is kept, as prompts often share it.

        Raises:
            OutpaceError: the constraint is wrong, or cannot be expressed.
        """
        if self._latest is None or self._latest[0] != wanted:
            self._latest = wanted, compiled(self._tokenizer, _source(wanted))
        return self._latest[1]


def _source(wanted: StructuredOutputs) -> dict[str, Any] | str:
    """A constraint as a JSON schema, or in Lark."""
    if wanted.json is not None:
        found: dict[str, Any] = json.loads(str(wanted.json))
        return found
    if wanted.regex:
        return Free("regex", wanted.regex).lark()
    if wanted.choice:
        return Free("choice", json.dumps(wanted.choice)).lark()
    return grammar_of(wanted.grammar or "").lark()


def tokenizer_of(tokenizer: Any, vocabulary: int, eos: list[int]) -> llguidance.LLTokenizer | str:
    """llguidance's tokenizer, or the reason why there is none."""
    named = getattr(tokenizer, "vocabulary", None)
    try:
        if named is None:
            return llguidance.hf.from_tokenizer(tokenizer, vocabulary, eos)
        from llguidance.llamacpp import lltokenizer_from_vocab  # imports llama_cpp

        return lltokenizer_from_vocab(named, vocabulary, eos)
    except Exception as error:  # llguidance may raise any error of its Rust code
        return first_line(error)


def compiled(tokenizer: llguidance.LLTokenizer, schema: dict[str, Any] | str) -> llguidance.LLMatcher:
    """A matcher of the JSON texts that a schema allows, without optional whitespace; or of a grammar's texts.

    Raises:
        OutpaceError: the schema is wrong, or beyond llguidance's limits.
    """
    try:
        if isinstance(schema, str):
            text = llguidance.LLMatcher.grammar_from_lark(schema)
        else:
            text = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_flexible": False}
            )
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        matcher.compute_bitmask()
    except ValueError as error:
        raise OutpaceError(f"the schema cannot be used: {error}") from error
    if matcher.is_error():
        raise OutpaceError(f"the schema cannot be used: {matcher.get_error().strip()}")
    return matcher
