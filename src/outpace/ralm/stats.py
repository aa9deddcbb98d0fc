"""What a request with changing documents cost, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core import FinishReason


@dataclass
class RalmStats:
    """Raw counts and seconds of one request.

    Attributes:
        batches: calls of the knowledge base.
        queries: queries in them.
        blocks: blocks decoded, those undone included.
        hits, misses: guesses that the knowledge base confirmed, and those it did not; guesses that followed a
            wrong one are neither, for they were made for another text.
        rollbacks: rounds in which decoded blocks were undone.
        undone: blocks undone.
        prompts: prompts that were read (a new document, or a rollback).
        steps: forwards of the target.
        seconds_search: in the knowledge base.
        seconds_wait: of these, those in which nothing was decoded.
        seconds_decode: in the engine.
        lossy: the engine's verifier changes the output's distribution.
    """

    batches: int = 0
    queries: int = 0
    blocks: int = 0
    hits: int = 0
    misses: int = 0
    rollbacks: int = 0
    undone: int = 0
    prompts: int = 0
    steps: int = 0
    seconds_search: float = 0.0
    seconds_wait: float = 0.0
    seconds_decode: float = 0.0
    lossy: bool = False

    @property
    def seconds(self) -> float:
        return self.seconds_wait + self.seconds_decode

    @property
    def hit_rate(self) -> float:
        """Of the guesses that could be checked, the share that was right."""
        checked = self.hits + self.misses
        return self.hits / checked if checked else 0.0


@dataclass(frozen=True)
class RalmGeneration:
    """The answer to one prefix.

    Attributes:
        documents: the number of the document in front of each block of output.
        stats: what it cost.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    seed: int
    documents: list[int]
    stats: RalmStats
