"""The result of a request with changing documents, and its counts."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core import FinishReason, Promise


@dataclass
class RalmStats:
    """Raw counts and seconds of one request.

    Attributes:
        batches: calls to the knowledge base.
        queries: queries in those calls.
        blocks: blocks decoded, including those undone.
        hits, misses: guesses that the knowledge base confirmed and refuted; guesses after a wrong one count
            as neither, because they were made for a different text.
        rollbacks: rounds in which decoded blocks were undone.
        undone: blocks undone.
        prompts: prompts read (for a new document, or after a rollback).
        steps: forwards of the target.
        seconds_search: seconds in the knowledge base.
        seconds_wait: seconds of those in which nothing was decoded.
        seconds_decode: seconds in the engine.
        lossy: whether the engine's verifier changes the output's distribution.
        promise, why_inexact: as in ``Stats``.
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
    promise: Promise | None = None
    why_inexact: str | None = None

    @property
    def seconds(self) -> float:
        return self.seconds_wait + self.seconds_decode

    @property
    def hit_rate(self) -> float:
        """The share of checked guesses that were right."""
        checked = self.hits + self.misses
        return self.hits / checked if checked else 0.0


@dataclass(frozen=True)
class RalmGeneration:
    """The answer to one prefix.

    Attributes:
        documents: the number of the document in front of each block of output.
        stats: counts and seconds of the request.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    seed: int
    documents: list[int]
    stats: RalmStats
