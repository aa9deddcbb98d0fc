"""Grammars: a JSON schema as a mask over the logits, by llguidance, and drafts of the tokens it forces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llguidance

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import SequenceDrafter
from outpace.grammars.compiling import compiled
from outpace.grammars.matching import Constraints, Grammar, unlisted
from outpace.grammars.notations import Free
from outpace.sequence import Sequence
from outpace.serve.errors import Refused
from outpace.serve.pool import JobLimit, WorkerPool
from outpace.serve.request import ParsedRequest
from outpace.serve.schemas import Lark, is_plain, unforced
from outpace.serve.totals import CLIENT, Turns
from outpace.tree import chain

_SHARE = JobLimit(seconds=2.0, memory=2**28)  # of compiling a schema
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
        self._constraints: Constraints | OutpaceError
        try:
            self._constraints = Constraints(tokenizer, vocabulary, eos, marks)
        except OutpaceError as error:  # of requests that have a grammar
            self._constraints = error
        self.pool = WorkerPool("schemas", _SHARE, turns, "compiling the schema", "response_format")
        self._here = Turns(1)
        self._threads = ThreadPoolExecutor(2, "outpace-schemas")

    def constraints(self) -> Constraints:
        """The grammars of outputs.

        Raises:
            Refused: the tokenizer is of a kind that llguidance does not know.
        """
        if isinstance(self._constraints, OutpaceError):
            raise Refused(400, str(self._constraints))
        return self._constraints

    async def compile(
        self, schema: dict[str, Any] | Lark | Free, prefix: str | None = None
    ) -> llguidance.LLMatcher:
        """Compile a grammar, or a schema to a matcher of its JSON texts, without optional whitespace.

        A matcher cannot be sent between processes: a worker compiles the schema first, and what it did within
        its share is repeated here.

        Args:
            prefix: a grammar of what comes before, in which the text is ``@body``; None for nothing.

        Raises:
            Refused: the schema is wrong, or takes too much.
        """
        loop = asyncio.get_running_loop()
        if isinstance(schema, Free):
            here: Any = await self.pool.run(json.dumps(vars(schema)).encode())
        else:
            here = schema
            there = schema.bytes if isinstance(schema, Lark) else schema
            functions = dict(schema.schemas) if isinstance(schema, Lark) else {}
            job = await asyncio.to_thread(json.dumps, {"schema": there, "functions": functions})
            plain = {"anyOf": list(schema.schemas.values())} if isinstance(schema, Lark) else schema
            if len(job) > _SHORT or not is_plain(plain):
                await self.pool.run(job.encode())
        async with self._here.place(CLIENT.get()):
            return await loop.run_in_executor(self._threads, self._compile, here, prefix)

    def _compile(self, schema: dict[str, Any] | Lark | str, prefix: str | None) -> llguidance.LLMatcher:
        tokenizer = self.constraints().tokenizer
        try:
            return compiled(tokenizer, schema.text if isinstance(schema, Lark) else schema, prefix)
        except OutpaceError as error:
            if not isinstance(schema, Lark):
                raise Refused(400, str(error), "response_format") from error
            raise Refused(400, unforced(schema.schemas) or str(error), "tools") from error

    def of(self, matcher: llguidance.LLMatcher, request: ParsedRequest, prompt_length: int) -> Grammar:
        """A matcher for a sequence of a request."""
        schema = request.schema
        free = schema.unlisted if isinstance(schema, Lark) else unlisted(schema)
        return self.constraints().grammar(matcher, prompt_length, unlisted=free, thought=request.reasoning)

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()
        self._threads.shutdown(wait=False)


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
