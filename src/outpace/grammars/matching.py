"""The tokens that a grammar allows next, by llguidance, as a mask over the logits."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property
from typing import Any

import llguidance
import llguidance.hf
import torch
from llguidance import TokenizerWrapper
from torch import Tensor

from outpace.core import OutpaceError, StructuredOutputs, first_line
from outpace.grammars.compiling import compiled
from outpace.grammars.effects import effective, lists_keys
from outpace.grammars.keys import ObjectKeys, Thought, unpacked
from outpace.grammars.notations import Free, written
from outpace.transfer import upload


def tokenizer_of(
    tokenizer: Any, vocabulary: int, eos: Collection[int], marks: Collection[int] = ()
) -> llguidance.LLTokenizer:
    """llguidance's tokenizer, whose making holds Python's lock for a second or more.

    Args:
        tokenizer: a fast transformers tokenizer, or a GGUF file's.
        vocabulary: number of logits per row.
        eos: the tokens that end an output.
        marks: further tokens that no text is written with.

    Raises:
        OutpaceError: llguidance does not know the tokenizer.
    """
    named, ends = getattr(tokenizer, "vocabulary", None), sorted(eos)
    vocabulary = max(vocabulary, len(tokenizer))  # of which the model may have no logits for the last
    try:
        if named is None:
            found = llguidance.hf.from_tokenizer(tokenizer, vocabulary, ends)
        else:
            from llguidance.llamacpp import lltokenizer_from_vocab  # imports llama_cpp

            found = lltokenizer_from_vocab(named, vocabulary, ends)
        return llguidance.LLTokenizer(TokenizerWrapper(_Plain(found, ends, marks)), eos_token=ends)
    except Exception as error:  # llguidance may raise any error of its Rust code
        raise OutpaceError(f"this model's tokenizer supports no grammars: {first_line(error)}") from error


class _Plain:
    """A tokenizer for llguidance that writes no text with special tokens.

    llguidance's own read a text that is spelt like a special or an added token as that token, also where a
    grammar forces it as text.

    Attributes:
        tokens, special_token_ids, eos_token_id, bos_token_id: what llguidance reads of a tokenizer.
    """

    def __init__(self, own: llguidance.LLTokenizer, eos: list[int], marks: Collection[int]) -> None:
        self._own = own
        every = range(own.vocab_size)
        self.tokens = [own.decode_bytes([token]) for token in every]
        special = {token for token in every if own.is_special_token(token)} | set(marks)
        self.special_token_ids = sorted(special)
        self._spelt = {token: self.tokens[token] for token in special}
        self.eos_token_id, self.bos_token_id = eos[0] if eos else None, None

    def __call__(self, text: bytes | str) -> list[int]:
        left, found = text if isinstance(text, bytes) else text.encode(), list[int]()
        while left:
            tokens = self._own.tokenize_bytes(left)
            spelt = next((self._spelt[token] for token in tokens if token in self._spelt), None)
            if spelt is None or len(left) == 1:
                return found + tokens
            place = max(1, left.find(spelt) + (len(spelt) > 1))  # within it: neither part contains it
            found += self(left[:place])
            left = left[place:]
        return found


class Grammar:
    """A matcher for one sequence: its logits processor and its stopping criterion.

    Args:
        prompt_length: number of tokens before the output.
        keys: of the objects in the output, none of which comes twice; None if it is no JSON.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, prompt_length: int, keys: ObjectKeys | None = None
    ) -> None:
        self._matcher = matcher.deep_copy()
        self._read, self._keys = prompt_length, keys

    def _follow(self, new: list[int]) -> None:
        self._read += len(new)
        if self._keys is not None:
            for token in new:
                self._keys.feed(token)
        if new and not (self._matcher.is_stopped() or self._matcher.consume_tokens(new)):
            raise OutpaceError(f"the grammar cannot continue: {self._matcher.get_error().strip()}")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Exclude the tokens that the grammar does not allow next from scores [1, vocabulary]."""
        self._follow(input_ids[0, self._read :].tolist())
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise OutpaceError(f"the schema is too complex here: {self._matcher.get_error().strip()}")
        allowed = unpacked(mask, scores.shape[-1])
        if self._keys is not None:
            allowed = self._keys.others(self._matcher, allowed)
        return scores.masked_fill(~upload(allowed, scores.device), -torch.inf)

    def ended(self, tokens: list[int]) -> bool:
        self._follow(tokens[self._read :])
        return bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """Tokens of the text that must follow, in the tokenizer's encoding."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())


class Constraints:
    """The grammars of outputs for one tokenizer; its arguments are those of `tokenizer_of`.

    Raises:
        OutpaceError: llguidance does not know the tokenizer.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int, eos: Collection[int], marks: Collection[int] = ()
    ) -> None:
        self.tokenizer = tokenizer_of(tokenizer, vocabulary, eos, marks)
        self._latest: tuple[StructuredOutputs, llguidance.LLMatcher] | None = None

    @cached_property
    def _quoting(self) -> dict[int, bytes]:
        """The tokens of texts that contain a quotation mark, with their bytes."""
        own = self.tokenizer
        spelt = {token: own.decode_bytes([token]) for token in range(own.vocab_size)}
        return {
            token: data for token, data in spelt.items() if b'"' in data and not own.is_special_token(token)
        }

    def grammar(
        self, matcher: llguidance.LLMatcher, prompt_length: int, *, unlisted: bool, thought: Thought | None
    ) -> Grammar:
        """A matcher for one sequence.

        Args:
            unlisted: its texts are JSON, and may have keys that no schema lists.
            thought: what comes before the text; None for nothing.
        """
        keys = ObjectKeys(self._quoting, self.tokenizer.decode_bytes, thought) if unlisted else None
        return Grammar(matcher, prompt_length, keys)

    def of(self, wanted: StructuredOutputs, prompt_length: int) -> Grammar:
        """A matcher for one sequence; the latest grammar is kept, as prompts often share it.

        Raises:
            OutpaceError: the constraint is wrong, or cannot be expressed.
        """
        ((kind, given),) = ((kind, given) for kind, given in vars(wanted).items() if given)
        schema = written(kind, json.loads(given) if kind == "json" else given)
        if self._latest is None or self._latest[0] != wanted:
            source = schema.lark() if isinstance(schema, Free) else schema
            self._latest = wanted, compiled(self.tokenizer, source)
        return self.grammar(self._latest[1], prompt_length, unlisted=unlisted(schema), thought=None)


def unlisted(schema: Any) -> bool:
    """True for a JSON schema whose texts may have keys that it does not list."""
    return isinstance(schema, dict) and not lists_keys(effective(schema))
