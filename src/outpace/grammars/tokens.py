"""A model's tokenizer as llguidance reads it: no text is written with its special tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import llguidance
import llguidance.hf
from llguidance import TokenizerWrapper

from outpace.core import OutpaceError, first_line


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
