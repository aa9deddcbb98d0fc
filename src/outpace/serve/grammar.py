"""Grammars: a JSON schema as a mask over the logits, by llguidance, and drafts of the tokens it forces."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor

from outpace.core import Draft, OutpaceError, first_line
from outpace.drafters.base import SequenceDrafter
from outpace.sequence import Sequence
from outpace.serve.errors import Refused
from outpace.serve.pool import Pool, Share
from outpace.serve.schemas import Lark, compiled, is_plain
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
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: frozenset[int], turns: Turns) -> None:
        self._tokenizer = _made(tokenizer, vocabulary, sorted(eos))
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

    async def compile(self, schema: dict[str, Any] | Lark) -> llguidance.LLMatcher:
        """Compile a grammar, or a schema to a matcher of its JSON texts, without optional whitespace.

        A matcher cannot be sent between processes: a worker compiles the schema first, and what it did within
        its share is repeated here.

        Raises:
            Refused: the schema is wrong, or takes too much.
        """
        loop = asyncio.get_running_loop()
        there = schema.bytes if isinstance(schema, Lark) else schema
        job = await asyncio.to_thread(json.dumps, {"schema": there})
        plain = {"anyOf": list(schema.schemas)} if isinstance(schema, Lark) else schema
        if len(job) > _SHORT or not is_plain(plain):
            await self.pool.run(job.encode())
        here = schema.text if isinstance(schema, Lark) else schema
        async with self._here.place(CLIENT.get()):
            return await loop.run_in_executor(self._threads, self._compile, here)

    def _compile(self, schema: dict[str, Any] | str) -> llguidance.LLMatcher:
        tokenizer = self.tokenizer()
        try:
            return compiled(tokenizer, schema)
        except OutpaceError as error:
            raise Refused(
                400, str(error), "tools" if isinstance(schema, str) else "response_format"
            ) from error

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()
        self._threads.shutdown(wait=False)


def _made(tokenizer: Any, vocabulary: int, eos: list[int]) -> llguidance.LLTokenizer | str:
    """llguidance's tokenizer, or the reason why there is none."""
    named = getattr(tokenizer, "vocabulary", None)
    try:
        if named is None:
            return llguidance.hf.from_tokenizer(tokenizer, vocabulary, eos)
        from llguidance.llamacpp import lltokenizer_from_vocab  # imports llama_cpp

        return lltokenizer_from_vocab(named, vocabulary, eos)
    except Exception as error:  # llguidance may raise any error of its Rust code
        return first_line(error)


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
