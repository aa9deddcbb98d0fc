"""Grammars: a JSON schema as a mask over the logits, by llguidance, and drafts of the tokens it forces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance
import llguidance.hf
import torch
from llguidance import TokenizerWrapper
from torch import Tensor

from outpace.core import Draft, OutpaceError, first_line
from outpace.drafters.base import SequenceDrafter
from outpace.sequence import Sequence
from outpace.serve.effects import effective, lists_keys
from outpace.serve.errors import Refused
from outpace.serve.keys import Keys, unpacked
from outpace.serve.pool import Pool, Share
from outpace.serve.request import ParsedRequest
from outpace.serve.schemas import Lark, compiled, is_plain, unforced
from outpace.serve.totals import CLIENT, Turns
from outpace.transfer import upload
from outpace.tree import chain

_SHARE = Share(seconds=2.0, memory=2**28)  # of compiling a schema
_SHORT = 2**14  # bytes of a schema that is compiled here
_CHANCE = 0.98  # that a forced token is the target's, which may tokenise the same text differently


class Grammars:
    """Compiler of schemas for one tokenizer.

    It is made before requests are served: llguidance's tokenizer holds Python's lock for a second or more.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocabulary: number of logits per row.
        eos: the tokens that end an output.
        turns: places for jobs of processes.
        marks: further tokens that no text is written with.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        eos: frozenset[int],
        turns: Turns,
        marks: Collection[int] = (),
    ) -> None:
        self._tokenizer = _made(tokenizer, vocabulary, sorted(eos), marks)
        self.pool = Pool("schemas", _SHARE, turns, "compiling the schema", "response_format")
        self._here = Turns(1)
        self._threads = ThreadPoolExecutor(2, "outpace-schemas")

    def tokenizer(self) -> llguidance.LLTokenizer:
        """llguidance's tokenizer.

        Raises:
            Refused: the tokenizer is of a kind that llguidance does not know.
        """
        if isinstance(self._tokenizer, str):
            raise Refused(400, f"this model's tokenizer supports no grammars: {self._tokenizer}")
        return self._tokenizer

    async def compile(self, schema: dict[str, Any] | Lark, prefix: str | None = None) -> llguidance.LLMatcher:
        """Compile a grammar, or a schema to a matcher of its JSON texts, without optional whitespace.

        A matcher cannot be sent between processes: a worker compiles the schema first, and what it did within
        its share is repeated here.

        Args:
            prefix: a grammar of what comes before, in which the text is ``@body``; None for nothing.

        Raises:
            Refused: the schema is wrong, or takes too much.
        """
        loop = asyncio.get_running_loop()
        there = schema.bytes if isinstance(schema, Lark) else schema
        functions = dict(schema.schemas) if isinstance(schema, Lark) else {}
        job = await asyncio.to_thread(json.dumps, {"schema": there, "functions": functions})
        plain = {"anyOf": list(schema.schemas.values())} if isinstance(schema, Lark) else schema
        if len(job) > _SHORT or not is_plain(plain):
            await self.pool.run(job.encode())
        async with self._here.place(CLIENT.get()):
            return await loop.run_in_executor(self._threads, self._compile, schema, prefix)

    def _compile(self, schema: dict[str, Any] | Lark, prefix: str | None) -> llguidance.LLMatcher:
        tokenizer = self.tokenizer()
        try:
            return compiled(tokenizer, schema.text if isinstance(schema, Lark) else schema, prefix)
        except OutpaceError as error:
            if not isinstance(schema, Lark):
                raise Refused(400, str(error), "response_format") from error
            raise Refused(400, unforced(schema.schemas) or str(error), "tools") from error

    @cached_property
    def _quoting(self) -> dict[int, bytes]:
        """The tokens of texts that contain a quotation mark, with their bytes."""
        own = self.tokenizer()
        spelt = {token: own.decode_bytes([token]) for token in range(own.vocab_size)}
        return {
            token: data for token, data in spelt.items() if b'"' in data and not own.is_special_token(token)
        }

    def of(self, matcher: llguidance.LLMatcher, request: ParsedRequest, prompt_length: int) -> Grammar:
        """A matcher for a sequence of a request."""
        schema = request.schema
        if isinstance(schema, Lark):
            unlisted = schema.unlisted
        else:
            unlisted = isinstance(schema, dict) and not lists_keys(effective(schema))
        if not unlisted:
            return Grammar(matcher, prompt_length)
        keys = Keys(self._quoting, self.tokenizer().decode_bytes, request.reasoning)
        return Grammar(matcher, prompt_length, keys)

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()
        self._threads.shutdown(wait=False)


def _made(
    tokenizer: Any, vocabulary: int, eos: list[int], marks: Collection[int]
) -> llguidance.LLTokenizer | str:
    """llguidance's tokenizer, or the reason why there is none."""
    named = getattr(tokenizer, "vocabulary", None)
    vocabulary = max(vocabulary, len(tokenizer))  # of which the model may have no logits for the last
    try:
        if named is None:
            found = llguidance.hf.from_tokenizer(tokenizer, vocabulary, eos)
        else:
            from llguidance.llamacpp import lltokenizer_from_vocab  # imports llama_cpp

            found = lltokenizer_from_vocab(named, vocabulary, eos)
        return llguidance.LLTokenizer(TokenizerWrapper(_Plain(found, eos, marks)), eos_token=eos)
    except Exception as error:  # llguidance may raise any error of its Rust code
        return first_line(error)


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

    def __init__(self, matcher: llguidance.LLMatcher, prompt_length: int, keys: Keys | None = None) -> None:
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
        """True if the text is complete and nothing may follow it."""
        self._follow(tokens[self._read :])
        return bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """Tokens of the text that must follow, in the tokenizer's encoding."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())


@dataclass(frozen=True)
class Forced(SequenceDrafter[Sequence]):
    """Drafter of the text that the request's grammar forces.

    The target may encode the same text in other tokens, so the draft is verified like any other.
    """

    paper = "llguidance (github.com/guidance-ai/llguidance), fast-forward tokens"

    def start(self, sequence: Sequence, shared: Any) -> Sequence:
        return sequence

    def draft(self, state: Sequence) -> Draft:
        for processor in state.params.logits_processors:
            if isinstance(processor, Grammar):
                tokens = processor.forced()
                draft = chain(tokens[: state.within_reach(len(tokens))])
                chances = [_CHANCE**depth for depth in range(1, len(draft) + 1)]
                return Draft(draft.tokens, draft.parents, chances=chances)
        return Draft()
