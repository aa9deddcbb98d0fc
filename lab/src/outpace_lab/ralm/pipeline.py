"""Iterative retrieval-augmented generation, plain and speculative, in one loop.

In-context retrieval (Ram et al. 2023, arXiv 2302.00083): every ``stride`` tokens the document in front of
the text is replaced by the best one for the text's latest tokens. RaLMSpec (Zhang et al. 2024, arXiv
2401.14021): a local cache guesses the documents of several blocks, the knowledge base then answers the
queries of all of them at once, and the blocks from the first wrong guess on are undone.

As in the engine, plain decoding is the same loop without guesses. A round queries the blocks that it has
guessed and the one after them, so that it makes at least one block of progress.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.engine.request import token_ids
from outpace.spec import check_least
from outpace_lab.ralm.answer import Answer
from outpace_lab.ralm.pace import Pace
from outpace_lab.ralm.retriever import LocalCache, Retriever
from outpace_lab.ralm.stats import RalmGeneration, RalmStats

Query = TypeVar("Query")


@dataclass(frozen=True)
class Speculation:
    """Options of guessing documents.

    Attributes:
        stride: blocks decoded with guessed documents before the knowledge base is asked, at least 0; None
            chooses it for each round from measurements.
        max_stride: the maximum of a stride chosen like that.
        prefetch: documents per query that the knowledge base returns for the local cache, at least 1.
        asynchronous: decode one more block while the knowledge base searches in a thread.
    """

    stride: int | None = None
    max_stride: int = 16
    prefetch: int = 20
    asynchronous: bool = True

    def __post_init__(self) -> None:
        check_least("speculation", self, stride=0, max_stride=0, prefetch=1)


@dataclass(frozen=True)
class _Block(Generic[Query]):
    """The query at the start of a block, and the document guessed for it."""

    query: Query
    guess: int | None


@dataclass
class _Run(Generic[Query]):
    """The state of one request."""

    answer: Answer
    cache: LocalCache[Query]
    pace: Pace
    stats: RalmStats


class RalmPipeline(Generic[Query]):
    """Decoding with a document in front of the text that is chosen again every ``stride`` tokens.

    With the engine's verifier ``match`` the tokens are the same with and without speculation; with one that
    preserves the distribution, their distribution is.

    Args:
        engine: decodes, with its own drafter; it needs a tokenizer for the queries.
        retriever: ranks the documents.
        documents: the token ids that each document puts in front of the text, in the retriever's order.
        stride: output tokens per block, at least 1.
        query_tokens: the number of latest tokens of prefix and output that form a query, at least 1.
        speculation: how to guess documents; None asks the knowledge base before each block.

    Raises:
        OutpaceError: a value is out of range, or the engine has no tokenizer.
    """

    def __init__(
        self,
        engine: Engine,
        retriever: Retriever[Query],
        documents: Seq[Seq[int]],
        *,
        stride: int = 4,
        query_tokens: int = 32,
        speculation: Speculation | None = None,
    ) -> None:
        for name, value in (
            ("stride", stride),
            ("query_tokens", query_tokens),
            ("documents", len(documents)),
        ):
            if value < 1:
                raise OutpaceError(f"{name}: at least 1 is needed, not {value}")
        if engine.target.has_encoder:
            raise OutpaceError(
                "documents are put in front of the text, which an encoder-decoder model keeps apart from its "
                "source: make the engine with a decoder-only model"
            )
        if engine.tokenizer is None:
            raise OutpaceError("queries are texts: make the engine with Engine(..., tokenizer=tokenizer)")
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._retriever = retriever
        self._documents = documents
        self._stride = stride
        self._query_tokens = query_tokens
        self._guessing = speculation is not None
        self._how = speculation or Speculation(stride=0, prefetch=1, asynchronous=False)

    def generate(self, prefix: Seq[int], params: SamplingParams | None = None) -> RalmGeneration:
        """Decode after a prefix, with documents in front of it.

        Args:
            prefix: token ids; the last ones form the first query.
            params: greedy by default. ``logits_processors`` must be pure functions of their arguments,
                because they also see text that is undone later.

        Raises:
            ContextOverflow: document and prefix are longer than the context.
            OutpaceError: the request is invalid, or the retriever's answer is.
        """
        params = params or SamplingParams()
        if params.logprobs is not None:
            raise OutpaceError("logprobs are not recorded while documents change: leave logprobs out")
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(64))
        verifier, target = self._engine.verifier, self._engine.target
        stats = RalmStats(lossy=verifier.lossy)
        if verifier.keeps_tokens(params.greedy):
            stats.promise, stats.why_inexact = target.promise, target.why_inexact
        answer = Answer(self._engine, self._documents, token_ids(prefix), params, self._stride, stats)
        how = self._how
        run = _Run(answer, LocalCache(self._retriever), Pace(how.max_stride, how.asynchronous), stats)
        with ExitStack() as stack:
            stack.callback(answer.leave)
            pool = stack.enter_context(ThreadPoolExecutor(1)) if how.asynchronous else None
            while not answer.ended:
                self._round(run, pool)
            generation = answer.generation()
        return RalmGeneration(
            tokens=generation.tokens,
            text=generation.text or "",
            finish_reason=generation.finish_reason,
            seed=generation.seed,
            documents=answer.documents,
            stats=stats,
        )

    def _round(self, run: _Run[Query], pool: ThreadPoolExecutor | None) -> None:
        """Guess blocks, query them and the next one, undo from the first wrong guess on, and continue there.

        The last block queried has not been decoded, unless the answer ended with it.
        """
        answer, stats = run.answer, run.stats
        first = len(answer.documents)
        stride = run.pace.stride() if self._how.stride is None else self._how.stride
        blocks = [self._block(run)]
        while len(blocks) <= stride and self._extend(run, blocks[-1].guess) and not answer.ended:
            blocks.append(self._block(run))
        found = self._ask(run, blocks, pool)
        agreed = next(
            (i for i, (block, best) in enumerate(zip(blocks, found, strict=True)) if block.guess != best),
            len(blocks),
        )
        misses = int(agreed < len(blocks) and blocks[agreed].guess is not None)
        run.pace.guessed(agreed, misses)
        stats.hits += agreed
        stats.misses += misses
        decoded = len(answer.documents) - first
        right = min(agreed, decoded)
        if right < decoded:
            stats.rollbacks += 1
            stats.undone += decoded - right
            answer.cut(first + right)
        if right < len(blocks):
            self._extend(run, found[right])

    def _block(self, run: _Run[Query]) -> _Block[Query]:
        latest = run.answer.text[-self._query_tokens :]
        query = self._retriever.encode(self._tokenizer.decode(latest, skip_special_tokens=True))
        guess = run.cache.best(query) if self._guessing else None
        # A document that does not fit is an error only if the knowledge base confirms it.
        return _Block(query, guess if guess is not None and run.answer.fits(guess) else None)

    def _extend(self, run: _Run[Query], document: int | None) -> bool:
        """Decode a block if there is a document for it; return whether there was."""
        if document is None:
            return False
        began = time.perf_counter()
        run.answer.extend(document)
        seconds = time.perf_counter() - began
        run.pace.decoded(seconds)
        run.stats.blocks += 1
        run.stats.seconds_decode += seconds
        return True

    def _ask(
        self, run: _Run[Query], blocks: Seq[_Block[Query]], pool: ThreadPoolExecutor | None
    ) -> list[int]:
        """Ask for each block's best document; with a pool, decode the last block as guessed meanwhile."""
        queries = [block.query for block in blocks]
        began = time.perf_counter()
        if pool is None:
            answers, seconds = self._search(queries)
        else:
            pending = pool.submit(self._search, queries)
            if not run.answer.ended:
                self._extend(run, blocks[-1].guess)
            began = time.perf_counter()
            answers, seconds = pending.result()
        run.stats.seconds_wait += time.perf_counter() - began
        run.stats.seconds_search += seconds
        run.stats.batches += 1
        run.stats.queries += len(queries)
        run.pace.searched(len(queries), seconds)
        for documents in answers:
            run.cache.add(documents)
        return [documents[0] for documents in answers]

    def _search(self, queries: list[Query]) -> tuple[list[list[int]], float]:
        """The knowledge base's answers, best first, and the seconds that the search took."""
        began = time.perf_counter()
        answers = self._retriever.search(queries, min(self._how.prefetch, len(self._documents)))
        seconds = time.perf_counter() - began
        if len(answers) != len(queries) or not all(answers):
            raise OutpaceError(
                f"the retriever must name documents for each of {len(queries)} queries: {answers}"
            )
        outside = [d for documents in answers for d in documents if not 0 <= d < len(self._documents)]
        if outside:
            raise OutpaceError(f"the retriever names document {outside[0]}; there are {len(self._documents)}")
        return answers, seconds
