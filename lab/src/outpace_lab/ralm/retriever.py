"""The interface of a knowledge base, and the local cache that guesses its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

Query = TypeVar("Query")


class Retriever(Protocol[Query]):
    """Ranking of documents, numbered from 0, for a query of any type.

    A score must depend on the query and the document alone, to the last bit: not on the documents scored
    together, nor on the queries searched for together. Then a batch of queries gets the answers that each
    would get alone, and the local cache agrees with the knowledge base whenever it holds the best document.

    It is called by one thread at a time, though not always by the same one.
    """

    def encode(self, text: str) -> Query:
        """Make a query of a text; called once per query."""

    def scores(self, query: Query, documents: Sequence[int]) -> Sequence[float]:
        """The score of each of these documents; higher is better."""

    def search(self, queries: Sequence[Query], count: int) -> list[list[int]]:
        """The ``count`` best documents for each query by ``scores``; in a tie the lowest number first.

        The best one must not depend on ``count``.
        """


class LocalCache(Generic[Query]):
    """The documents that a request's searches have returned, ranked by the knowledge base's own scores.

    Args:
        retriever: provides the scores.
    """

    def __init__(self, retriever: Retriever[Query]) -> None:
        self._retriever = retriever
        self._documents: set[int] = set()

    def __len__(self) -> int:
        return len(self._documents)

    def add(self, documents: Iterable[int]) -> None:
        self._documents.update(documents)

    def best(self, query: Query) -> int | None:
        """The best document in the cache; None if it is empty."""
        documents = sorted(self._documents)
        scores = self._retriever.scores(query, documents)
        # max keeps the first of a tie, which is the lowest number, as in the knowledge base.
        return max(zip(scores, documents, strict=True), key=lambda pair: pair[0])[1] if documents else None
