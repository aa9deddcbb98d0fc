"""What the pipeline needs of a knowledge base, and the local cache that guesses its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

Query = TypeVar("Query")


class Retriever(Protocol[Query]):
    """Ranks documents, numbered from 0, for a query of whatever type it likes.

    A score depends on the query and the document alone, to the last bit: not on which documents are scored
    together, nor on which queries are asked together. Then a batch of queries gets the answers that each
    would get alone, and the local cache agrees with the knowledge base whenever it holds the best document.

    One thread at a time calls it, though not always the same one.
    """

    def encode(self, text: str) -> Query:
        """A text as a query; done once for each query, which is then scored and searched for as it is."""

    def scores(self, query: Query, documents: Sequence[int]) -> Sequence[float]:
        """The score of each of these documents, the higher the better."""

    def search(self, queries: Sequence[Query], count: int) -> list[list[int]]:
        """The ``count`` best documents for each query, by ``scores``; of equal ones the lowest number first.

        The best one does not depend on ``count``.
        """


class LocalCache(Generic[Query]):
    """The documents that a request has met, ranked by the knowledge base's own score.

    It belongs to one request, and holds at most what all its searches returned.

    Args:
        retriever: whose scores and whose documents.
    """

    def __init__(self, retriever: Retriever[Query]) -> None:
        self._retriever = retriever
        self._documents: set[int] = set()

    def __len__(self) -> int:
        return len(self._documents)

    def add(self, documents: Iterable[int]) -> None:
        self._documents.update(documents)

    def best(self, query: Query) -> int | None:
        """The best document it holds; None of none."""
        documents = sorted(self._documents)
        scores = self._retriever.scores(query, documents)
        # The first of equal ones is the lowest number, as in the knowledge base.
        return max(zip(scores, documents, strict=True), key=lambda pair: pair[0])[1] if documents else None
